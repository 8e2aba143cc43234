"""Ranks of a group that live in threads of this process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.net.slots import SlottedTransport
from gradwire.net.tcp import TcpTransport

from .recorder import PATIENCE


def connect_all(
    world_size: int, *, timeout: timedelta = PATIENCE, name: str = "test", mesh: type[TcpTransport] = TcpTransport,
    store: Any = None,
) -> list[TcpTransport]:  # fmt: skip
    """Connect the ranks of a group that live in threads of this process."""
    store = store or dist.HashStore()
    found: list[TcpTransport | BaseException | None] = [None] * world_size

    def connect(rank: int) -> None:
        try:
            found[rank] = mesh.connect(store, rank, world_size, timeout=timeout, name=name)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        raise errors[0]
    return found


@pytest.fixture(
    params=[
        "checksums",
        pytest.param("time slots", marks=pytest.mark.ci),
        pytest.param("job key", marks=pytest.mark.ci),
    ]
)
def group(request, monkeypatch):
    made: list[TcpTransport] = []
    mesh = SlottedTransport if request.param == "time slots" else TcpTransport
    if request.param == "job key":
        monkeypatch.setenv("GRADWIRE_JOB_KEY", "ab" * 32)

    def make(world_size: int, **options) -> list[TcpTransport]:
        made.extend(connect_all(world_size, mesh=mesh, **options))
        return made

    yield make
    for transport in made:
        transport.abort("the test has ended")
