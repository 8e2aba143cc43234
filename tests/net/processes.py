"""Ranks that are processes of their own, from the outside; the inside is `rank.py`."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.net.slots import SlottedTransport
from gradwire.net.tcp import TcpTransport
from tests.forks import forks

from . import rank as rank_module
from .recorder import PATIENCE

TIMEOUT = timedelta(seconds=2)


class Rank:
    """The outside of a rank in a process of its own; see `rank.py`."""

    def __init__(self, port: int, rank: int, world_size: int, timeout: timedelta, mesh: type[TcpTransport]) -> None:
        theirs, self.commands = forks.Pipe(duplex=False)
        self.events, told = forks.Pipe(duplex=False)
        arguments = (theirs, told, port, rank, world_size, timeout.total_seconds(), mesh)
        self.process = forks.Process(target=rank_module.main, args=arguments)
        self.process.start()
        theirs.close()
        told.close()

    def tell(self, *command: object) -> None:
        self.commands.send(command)

    def wait(self, event: str, seconds: float = PATIENCE.total_seconds()) -> dict:
        deadline = time.monotonic() + seconds
        while self.events.poll(max(0.0, deadline - time.monotonic())):
            found = self.events.recv()
            if found["event"] == event:
                return found
            assert found["event"] != "failed", found
        raise AssertionError(f"no {event} within {seconds:.1f} s")

    def quiet(self) -> bool:
        return not self.events.poll()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.commands.closed:
            return
        self.process.kill()
        self.process.join()
        self.process.close()
        self.commands.close()
        self.events.close()


@pytest.fixture(params=[TcpTransport, pytest.param(SlottedTransport, marks=pytest.mark.ci)])
def ranks(request):
    with ExitStack() as stack:

        def make(world_size: int, timeouts: list[timedelta] | None = None) -> list[Rank]:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(lambda: store.port)  # keeps the store until the ranks have ended
            made = []
            for rank in range(world_size):
                timeout = timeouts[rank] if timeouts else TIMEOUT
                made.append(Rank(store.port, rank, world_size, timeout, request.param))
                stack.callback(made[-1].end)
            for rank in made:
                rank.wait("started")
            return made

        yield make
