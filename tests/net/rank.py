"""A rank in a process of its own, that does what it is told and reports what happens to it."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch.distributed as dist

from gradwire.core.errors import SyncError
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks
from gradwire.wire.frame import FrameKind, Header

from .recorder import PATIENCE


class RankProcess:
    """The inside of the process: obeys `commands`, reports on `events`."""

    def __init__(self, commands: Connection, events: Connection, port: int, rank: int, world_size: int) -> None:
        self.commands = commands
        self.events = events
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.rank = rank
        self.world_size = world_size

    def run(self, timeout: timedelta, mesh: type[TcpTransport]) -> None:
        self.transport = mesh.connect(
            self.store, self.rank, self.world_size, timeout=timeout, name="test", connect_timeout=PATIENCE
        )
        self.transport.start(Callbacks(admit=lambda peer, header: None, deliver=self.delivered, fail=self.failed))
        self.say("started")
        while True:
            command, *arguments = self.commands.recv()
            if command == "leave":
                return
            getattr(self, command)(*arguments)

    def say(self, event: str, **details: object) -> None:
        self.events.send({"event": event, **details})

    def delivered(self, peer: int, header: Header, body: np.ndarray) -> None:
        self.say("got", peer=peer, size=body.nbytes, sum=int(body.sum()))

    def failed(self, error: SyncError) -> None:
        self.say("failed", type=type(error).__name__, rank=error.rank, message=str(error))

    def send(self, peer: int, size: int) -> None:
        header = Header(FrameKind.PAYLOAD, sender=self.rank, epoch=self.transport.epoch)
        self.transport.send(peer, header, np.ones(size, dtype=np.uint8))

    def close(self) -> None:
        self.transport.close()

    def usage(self) -> None:
        transports = [thread for thread in threading.enumerate() if thread.name.startswith("gradwire")]
        self.say("usage", cpu=time.process_time(), threads=len(transports))

    def fork(self) -> None:
        """Start a child that outlives this process, as a data loader's worker may."""
        if os.fork() == 0:
            try:
                self.send(self.rank ^ 1, 1)
                self.say("child", error="")
            except SyncError as error:
                self.say("child", error=str(error))
            self.transport.close()
            try:
                self.commands.recv()  # until the test ends
            finally:
                os._exit(0)


def main(
    commands: Connection,
    events: Connection,
    port: int,
    rank: int,
    world_size: int,
    seconds: float,
    mesh: type[TcpTransport],
) -> None:
    """Run a rank until it is told to leave or its commands end."""
    try:
        RankProcess(commands, events, port, rank, world_size).run(timedelta(seconds=seconds), mesh)
    except EOFError:
        os._exit(0)
