"""Several ranks in one process: real engines and frames over the in-memory transport, one thread per rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import gradwire as gw
from gradwire.sync.group import GroupInfo
from gradwire.sync.options import SyncOptions
from gradwire.sync.strategies import STRATEGIES, peer_strategies
from gradwire.sync.synchronizer import Synchronizer
from tests.net.memory import MemoryNetwork

_names = itertools.count()
ANY = [name for name in peer_strategies() if not STRATEGIES[name].sparse]
"""Strategies between ranks that support every compressor."""
PATIENCE = 100.0  # seconds, on a busy machine


def fitting(strategy: str, method: str) -> str:
    """The method, or one that lists pairs if the strategy supports no other."""
    return "topk:ratio=0.1" if STRATEGIES[strategy].sparse and not gw.make(method).sparse else method


class Ranks:
    """The synchronizers of one group. `each` runs a function on all of them at the same time."""

    def __init__(self, synchronizers: list[Synchronizer], pool: ThreadPoolExecutor, network: MemoryNetwork) -> None:
        self.synchronizers = synchronizers
        self.network = network
        self._pool = pool

    def each(self, function: Callable[[Synchronizer], Any]) -> list[Any]:
        """Return the results by rank, or raise the first exception."""
        return list(self._pool.map(function, self.synchronizers, timeout=PATIENCE))

    def outcomes(self, function: Callable[[Synchronizer], Any]) -> list[Any]:
        """Return the results or exceptions by rank."""

        def guarded(synchronizer: Synchronizer) -> Any:
            try:
                return function(synchronizer)
            except Exception as error:
                return error

        return self.each(guarded)


@contextmanager
def ranks(world_size: int, plan: Any, *, timeout: float = 10.0, **options: Any) -> Iterator[Ranks]:
    """`world_size` synchronizers over an in-memory network.

    `plan`, `nodes`, `server` and `watch_norms` may be functions of the rank; `aux_of` is one that returns `aux`.

    Fields of `SyncOptions` may be passed directly; with `time_slots`, the ranks meet over TCP. Unless told otherwise,
    two ranks share a node, where there are more than two.
    """
    options.setdefault("nodes", 2 if world_size > 2 else 1)
    store = dist.HashStore()
    name = f"test{next(_names)}"
    with ExitStack() as stack:
        network = stack.enter_context(MemoryNetwork(world_size, timeout=timedelta(seconds=timeout)))
        pool = stack.enter_context(ThreadPoolExecutor(world_size))

        def make(rank: int) -> Synchronizer:
            info = GroupInfo(rank, world_size, store, name)
            chosen = plan(rank) if callable(plan) else plan
            by_rank = ("nodes", "server", "watch_norms")
            own = options | {name: options[name](rank) for name in by_rank if callable(options.get(name))}
            if "aux_of" in own:
                own["aux"] = own.pop("aux_of")(rank)
            fields = {field.name: own.pop(field.name) for field in dataclasses.fields(SyncOptions) if field.name in own}
            shared = SyncOptions(timeout=timedelta(seconds=timeout), **fields)
            transport = None if shared.time_slots else network.transports[rank]
            return Synchronizer(info, chosen, options=shared, transport=transport, **own)

        made = list(pool.map(make, range(world_size), timeout=PATIENCE))
        stack.callback(lambda: list(pool.map(lambda one: one.close(), made)))
        yield Ranks(made, pool, network)
