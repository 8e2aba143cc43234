"""The ranks of a group and the engine between them: what they agree on, and what they tell each other beside gradients.

The part of `Synchronizer` that knows nothing of tensors and plans: the two are one class to whoever uses them.
"""

# Shapes: W = ranks, K = numbers.

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core.errors import GradwireError, SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.store import BoundedStore
from gradwire.net.transport import Transport
from gradwire.observe.recorder import write_dump
from gradwire.observe.trace import Trace
from gradwire.residuals.transaction import Residuals
from gradwire.sync import exchange, replica
from gradwire.sync.agreement import agree, share
from gradwire.sync.engine import Engine
from gradwire.sync.graph import TaskGraph
from gradwire.sync.group import GroupInfo
from gradwire.sync.nodes import NodeMap, here
from gradwire.sync.options import SyncOptions
from gradwire.sync.registry import TensorRegistry
from gradwire.sync.strategies import Runtime
from gradwire.sync.strategies.register import Service, ServiceAddress

logger = logging.getLogger("gradwire")
_open: weakref.WeakSet[Peers] = weakref.WeakSet()


class Peers:
    """Base of `Synchronizer`, which says what its arguments are."""

    def __init__(self, group: dist.ProcessGroup | GroupInfo | None, options: SyncOptions) -> None:
        self.timeout = options.timeout
        self.seed = options.seed
        self.step = 0
        self.events = EventStream()
        info = GroupInfo.of(group)
        self._info = replace(info, store=BoundedStore(info.store, options.timeout))
        self.rank, self.world_size = self._info.rank, self._info.world_size
        self._traces: list[Trace] = []
        self._rounds = itertools.count()
        self._topics = itertools.count()
        self._dump_dir = None if options.dump_dir is None else Path(options.dump_dir)
        self._engine: Engine | None = None
        self._addresses: dict[str, ServiceAddress] = {}  # of the strategies that need more than the ranks
        self._services: dict[str, Service] = {}
        self._stall_timeout = options.stall_timeout or 10 * options.timeout
        self._name = f"gradwire/{self._info.next_number()}"
        self._nodes = NodeMap(self.world_size, options.nodes)
        _open.add(self)

    def _agree(self, document: dict[str, Any]) -> None:
        topic = f"{self._name}/agree/{next(self._topics)}"
        told = agree(self._info.store, self.rank, self.world_size, topic, document, self.timeout, tell=here(os.environ))
        self._nodes.names = self._nodes.names or told

    def _start(self, transport: Transport | None, tensors: TensorRegistry, residuals: Residuals) -> None:
        if transport is None:
            from gradwire.net.tcp import TcpTransport

            transport = TcpTransport.connect(
                self._info.store, self.rank, self.world_size, timeout=self.timeout, name="ranks"
            )
        self._around = Runtime(transport, residuals, self.events, self.seed, self._nodes)
        self._engine = Engine(
            transport,
            admit=tensors.admit,
            events=self.events,
            stall_timeout=self._stall_timeout,
            on_failure=self._give_up,
            early_bytes_limit=tensors.early_bytes_limit(),
        )

    def _connect_services(self, tensors: TensorRegistry) -> None:
        """Connect to the service of each strategy that needs one, once all ranks have agreed on tensors for it.

        On failure: the other ranks hear of it.
        """
        for name in sorted({entry.strategy for entry in tensors.entries.values()} & self._addresses.keys()):
            if name in self._services:
                self._services[name].check(tensors)
                continue
            if self._engine is None:
                continue
            session = int(self.share(str(time.time_ns())))
            try:
                service = self._addresses[name].connect(
                    tensors, self.rank, self.world_size, session, self.timeout, self._stall_timeout
                )
            except GradwireError as error:
                # The others may be connected, and would wait for this rank.
                self._engine.fail(error if isinstance(error, SyncError) else SyncError(str(error), phase="connect"))
                self._engine.close()
                raise
            self._around.services[name] = self._services[name] = service

    def wait(self) -> None:
        """Block until everything that was begun has ended.

        Raises:
            SyncError: the synchronizer failed; within twice `timeout`.
        """
        if self._engine is not None:
            self._engine.wait_idle()

    # -- beside gradients ------------------------------------------------------------------------------------

    def check_replicas(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """Compare a hash of `tensors` over all ranks, beside the gradients. Returns at once; all ranks call it.

        Args:
            tensors: what must be the same on all ranks; None where this rank has nothing to compare at the moment.

        On failure: `wait` raises `ReplicaError` naming the odd ranks.
        """
        if self._engine is None:
            return
        mine = replica.ABSENT if tensors is None else replica.fingerprint(tensors)
        self._exchange("parameters", np.array([mine], float), replica.compare, "hash")

    def exchange(self, numbers: np.ndarray) -> torch.futures.Future[np.ndarray]:
        """Bring float64[K] of every rank to all: a future of float64[W, K]. Returns at once; all ranks call it.

        On failure: the future raises what `wait` raises.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._engine is None:
            future.set_result(numbers[None])
        else:
            found: list[np.ndarray] = []

            def done() -> None:
                future.set_result(found[0])

            self._exchange("numbers", numbers, found.append, "numbers", done, future.set_exception)
        return future

    def share(self, text: str | None) -> str:
        """Bring rank 0's text to all ranks, through the job's store. Blocks; all ranks call it.

        Raises:
            PeerTimeoutError: rank 0 said nothing in time.
        """
        topic = f"{self._name}/share/{next(self._topics)}"
        return share(self._info.store, self.rank, self.world_size, topic, text, self.timeout)

    def link_busy_seconds(self) -> float:
        """How long this rank's frames have been under way so far, added up over peers; see `Transport.busy_seconds`."""
        return 0.0 if self._engine is None else self._around.transport.busy_seconds()

    def run_alone(self, build: Callable[[TaskGraph, Transport], None], name: str) -> None:
        """Run one task graph of the caller's between steps, to its end. All ranks call it.

        Args:
            build: Adds the tasks.
            name: Name of the graph, for reports.

        Raises:
            SyncError: The synchronizer failed.
        """
        assert self._engine is not None, "one rank has nobody to exchange frames with"
        self.wait()
        graph = TaskGraph(name, next(self._rounds), priority=0, on_done=lambda: None)
        build(graph, self._around.transport)
        self._engine.run(graph)
        self._engine.wait_idle()

    def _exchange(
        self,
        name: str,
        mine: np.ndarray,
        use: Callable[[np.ndarray], None],
        what: str,
        on_done: Callable[[], None] = lambda: None,
        on_failed: Callable[[SyncError], None] = lambda error: None,
    ) -> None:
        assert self._engine is not None
        graph = TaskGraph(name, next(self._rounds), 0, on_done, on_failed)
        detail = {"method": "control message", "elements": 0}
        self.events.emit(Event("submit", time.monotonic(), tensor=name, round=graph.round, detail=detail))
        exchange.build(graph, mine, self._around.transport, self.events, use, what)
        self._engine.run(graph)

    # -- traces, ending --------------------------------------------------------------------------------------

    def trace(self, path: str | Path) -> Trace:
        """Write everything that happens from now on to a file, as Chrome trace JSON; one file a rank.

        Args:
            path: the file; the rank goes before its suffix, or where it says ``{rank}``. An older one is overwritten.

        Returns:
            The trace: ``close()`` ends it, as the end of a `with` block or of the synchronizer does.
        """
        trace = Trace(self.events, path, self.rank, self.world_size)
        self._traces.append(trace)
        return trace

    def close(self) -> None:
        """End threads and connections. Idempotent. All ranks call it."""
        if self._engine is not None:
            self._engine.close()
        for service in self._services.values():
            service.close()
        for trace in self._traces:
            trace.close()
        _open.discard(self)

    def _exit(self) -> None:
        """End with the interpreter: in good order between steps; within one, peers are told at once."""
        if self._engine is None or self._engine.idle:
            self.close()
        else:
            self._engine.transport.abort("its interpreter exits in the middle of a step")

    def _give_up(self, error: SyncError, state: dict[str, Any]) -> None:
        """Write the flight recorder's file, and tell the services; the engine tells the peers."""
        try:
            path = write_dump(
                error,
                rank=self.rank,
                world_size=self.world_size,
                events=self.events,
                state=state | {"step": self.step},
                directory=self._dump_dir,
            )
            note = f"Flight recorder: {path}"
        except Exception as problem:  # must not stop what follows
            logger.exception("The flight recorder could not be written.")
            note = f"There is no file of the flight recorder: {problem}"
        error.args = (f"{error} {note}",)
        for service in self._services.values():  # which wait for their threads, and this may be one of them
            threading.Thread(target=service.close, args=(str(error),), daemon=True).start()


def _exit_all() -> None:
    for peers in list(_open):
        peers._exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # they are the parent's to end
atexit.register(_exit_all)
