"""The ranks of a group and the engine between them: agreement, control messages, traces, and the end of the job.

`Peers` is the base class of `Synchronizer`. It encodes and submits nothing.
"""

# Shapes: W = ranks, K = numbers.

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core import threads
from gradwire.core.errors import PeerLostError, SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.forks import ProcessBound
from gradwire.net.slots import SlottedTransport
from gradwire.net.store import BoundedStore
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import PeerState, Transport
from gradwire.observe.recorder import write_dump
from gradwire.observe.trace import Trace
from gradwire.residuals.transaction import Residuals
from gradwire.sync import replica
from gradwire.sync.agreement import agree, share
from gradwire.sync.engine import Engine
from gradwire.sync.engine_errors import Waiting
from gradwire.sync.exchange import ExchangeRun
from gradwire.sync.group import GroupInfo
from gradwire.sync.nodes import NodeMap, Nodes, current_node, grouped
from gradwire.sync.operations import Operations
from gradwire.sync.options import SyncOptions
from gradwire.sync.run import Run
from gradwire.sync.runtime import Runtime
from gradwire.sync.strategies.register import Service, ServiceAddress
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.wire.frame import HEADER_BYTES

logger = logging.getLogger("gradwire")
T = TypeVar("T")
_open: weakref.WeakSet[Peers] = weakref.WeakSet()


class Peers(ProcessBound):
    """Base of `Synchronizer`; see there for the arguments."""

    def __init__(self, group: dist.ProcessGroup | GroupInfo | None, options: SyncOptions) -> None:
        self.timeout = options.timeout
        self.seed = options.seed
        self.step = 0
        self.closed = False
        self.events = EventStream()
        info = GroupInfo.of(group)
        self._info = replace(info, store=BoundedStore(info.store, options.timeout))
        self.rank, self.world_size = self._info.rank, self._info.world_size
        self._traces: list[Trace] = []
        self._rounds = itertools.count()
        self._topics = itertools.count()
        self._dump_dir = None if options.dump_dir is None else Path(options.dump_dir)
        self._engine: Engine | None = None
        self._num_threads = options.threads
        self._time_slots = options.time_slots
        self._integrity = options.integrity
        self._addresses: dict[str, ServiceAddress] = {}  # by name of the strategy that needs the service
        self._services: dict[str, Service] = {}
        self._stall_timeout = options.stall_timeout
        self._name = f"gradwire/{self._info.next_number()}"
        self._nodes = NodeMap(self.world_size, options.nodes)
        self._bind()
        _open.add(self)

    def _release(self) -> None:
        _open.discard(self)  # the parent closes it

    @property
    def nodes(self) -> Nodes:
        """The ranks of each node."""
        assert self._nodes.names is not None, "ranks have exchanged them"
        return grouped(self._nodes.names)

    def _agree(self, document: dict[str, Any]) -> None:
        topic = f"{self._name}/agree/{next(self._topics)}"
        node = current_node(os.environ)
        names = self._together(agree, topic, document, note=node)
        self._nodes.names = self._nodes.names or names

    def _together(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Make a call that all ranks make, through the job's store.

        Ranks that are connected have the stall timeout to come, since a dead one is noticed. Others have `timeout`.
        """
        store, engine = self._info.store, self._engine
        if engine is None:
            return call(store, self.rank, self.world_size, *arguments, self.timeout, **options)
        try:
            limit, lost = self._stall_timeout, engine.lost_peer
            return call(store, self.rank, self.world_size, *arguments, limit, lost, **options)
        except PeerLostError as error:
            engine.fail(error)  # tells the other ranks who is lost
            raise

    def _start(self, transport: Transport | None, tensors: TensorRegistry, residuals: Residuals) -> None:
        if transport is None:
            mesh = SlottedTransport if self._time_slots else TcpTransport
            transport = mesh.connect(
                self._info.store, self.rank, self.world_size, timeout=self.timeout, name="ranks",
                integrity=self._integrity,
            )  # fmt: skip
        self._runtime = Runtime(transport, residuals, self.events, self.seed, self._nodes)
        self._engine = Engine(
            transport,
            admit=tensors.admit,
            events=self.events,
            stall_timeout=self._stall_timeout,
            on_failure=self._on_failure,
            early_bytes_limit=tensors.early_bytes_limit(),
            threads=self._num_threads,
        )

    def _connect_services(self, tensors: TensorRegistry) -> None:
        """Connect to the services of the strategies in use. All ranks have agreed on their tensors.

        On failure: the other ranks are notified.
        """
        for name in sorted({entry.strategy for entry in tensors.entries.values()} & self._addresses.keys()):
            if name in self._services:
                self._services[name].check(tensors)
                continue
            if self._engine is None:
                continue
            try:
                session = int(self.share(str(secrets.randbits(62))))
                service = self._addresses[name].connect(
                    tensors, self.rank, self.world_size, session, self.timeout, self._stall_timeout
                )
            except BaseException as error:  # whatever it is, the other ranks would wait for this one
                said = str(error) or repr(error)
                failure = error if isinstance(error, SyncError) else SyncError(said, phase="connect")
                self._engine.fail(failure)
                self._engine.close()
                raise
            self._runtime.services[name] = self._services[name] = service

    def raise_if_failed(self) -> None:
        """Raise the error that has ended this synchronizer, if one has."""
        if self._engine is not None:
            self._engine.raise_if_failed()

    def wait(self) -> None:
        """Block until everything submitted has ended.

        Raises:
            SyncError: The synchronizer failed. Raised within twice `timeout` of a failure, and after `stall_timeout` if
                a rank lives but does not join the step.
        """
        if self._engine is not None:
            self._engine.wait_idle()

    def lost_peer(self) -> SyncError | None:
        """Return why nothing can be averaged any more: the failure, or a rank that is gone. None if all is well."""
        return None if self._engine is None else self._engine.lost_peer()

    @property
    def replicas_may_differ(self) -> bool:
        """Whether a service lets ranks apply different means."""
        return any(self._addresses[name].replicas_may_differ for name in self._services)

    # -- for people to look at, from any thread --------------------------------------------------------------

    @property
    def failure(self) -> SyncError | None:
        """The error that has ended this synchronizer, or None."""
        return None if self._engine is None else self._engine.error

    @property
    def epoch(self) -> int | None:
        """64-bit id of the ranks' group, the same on all of them and another one after each start. None if alone."""
        return None if self._engine is None else self._engine.transport.epoch

    def peer_states(self) -> list[PeerState]:
        """Return what this rank sees of each peer."""
        return [] if self._engine is None else self._engine.transport.peer_states()

    def longest_wait(self) -> Waiting | None:
        """Return what has waited longest for a frame, a reply or gradients. None if nothing waits."""
        return None if self._engine is None else self._engine.longest_wait()

    # -- control messages ------------------------------------------------------------------------------------

    def check_replicas(
        self, tensors: Iterable[torch.Tensor] | None, on_difference: Callable[[list[int]], None] = replica.fail
    ) -> None:
        """Compare a hash of tensors over all ranks, and step and seed. Returns at once. Call it on every rank.

        Args:
            tensors: Tensors that must be equal on all ranks; None if this rank has nothing to compare at the moment.
            on_difference: Called with the ranks whose tensors differ, if there are any, on a thread of the
                synchronizer. An error that it raises ends the job.

        On failure: `wait` raises a `ReplicaError` that names the ranks that differ.
        """
        if self._engine is None:
            return

        def compare(numbers: np.ndarray) -> None:
            replica.check_steps(numbers)
            if odd := replica.odd_ranks(numbers):
                on_difference(odd)

        mine = replica.numbers(tensors, self.step, self.seed)
        self._exchange("parameters", mine, compare, "hash")

    def exchange(self, numbers: np.ndarray) -> torch.futures.Future[np.ndarray]:
        """Send numbers of every rank to all ranks. Returns at once. Call it on every rank.

        Args:
            numbers: Numbers of this rank, float64[K]. K is the same on all ranks.

        Returns:
            Future of the numbers of all ranks, float64[W, K].

        On failure: the future raises the error that `wait` raises.
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
        """Send rank 0's text to all ranks through the job's store, and return it. Blocks. Call it on every rank.

        Raises:
            SyncError: Rank 0 did not publish the text in time, or a rank is lost.
        """
        topic = f"{self._name}/share/{next(self._topics)}"
        return self._together(share, topic, text)

    def link_busy_seconds(self) -> float:
        """Return the time that this rank's frames were in transit, summed over peers; see `Transport.busy_seconds`."""
        return 0.0 if self._engine is None else self._runtime.transport.busy_seconds()

    @property
    def prefix_bytes(self) -> int:
        """Bytes of a frame between ranks before its body."""
        return HEADER_BYTES if self._engine is None else self._runtime.transport.prefix_bytes

    def run_alone(self, operations: Operations, codec: Any, name: str) -> None:
        """Run operations to their end, between steps. Call it on every rank.

        Args:
            operations: What to do.
            codec: Has the methods that they call.
            name: Name of the run, for reports.

        Raises:
            SyncError: The synchronizer failed.
        """
        assert self._engine is not None, "a single rank has no peers"
        self.wait()
        self._engine.run(Run(operations, codec, name, next(self._rounds)))
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
        self._engine.raise_if_failed()
        run = ExchangeRun(mine, self.rank, self.world_size, use, what, name, next(self._rounds), on_done, on_failed)
        detail = {"method": "control message", "elements": 0}
        self.events.emit(Event("submit", time.monotonic(), tensor=name, round=run.round, detail=detail))
        self._engine.run(run)

    # -- traces, ending --------------------------------------------------------------------------------------

    def trace(self, path: str | Path) -> Trace:
        """Start writing all events to a Chrome trace, one file per rank. An existing file is overwritten.

        Args:
            path: File. ``{rank}`` in it stands for the rank; without it, the rank is inserted before the suffix.

        Returns:
            The trace. It ends with its ``close()``, a `with` block, or the synchronizer.
        """
        trace = Trace(self.events, path, self.rank, self.world_size)
        self._traces.append(trace)
        return trace

    def close(self) -> None:
        """End threads and connections. Idempotent. Call it on every rank."""
        self.closed = True
        if self.forked:
            return  # the parent closes all
        if self._engine is not None:
            self._engine.close()
        for service in self._services.values():
            service.close()
        for trace in self._traces:
            trace.close()
        _open.discard(self)

    def _exit(self) -> None:
        """Close when the interpreter exits. In the middle of a step, notify the peers at once."""
        if self._engine is None or self._engine.idle:
            self.close()
        else:
            self._engine.transport.abort("its interpreter exits in the middle of a step")

    def _on_failure(self, error: SyncError, state: dict[str, Any]) -> None:
        """Close the services and write the flight recorder's file. The engine notifies the peers."""
        for service in self._services.values():  # closing waits for their threads, and this may be one of them
            threads.start("gradwire-close", partial(service.close, str(error)), on_error=None)
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
        except Exception as problem:
            logger.exception("The flight recorder could not be written.")
            note = f"The flight recorder could not be written: {problem}"
        error.args = (f"{error} {note}",)


def _exit_all() -> None:
    for peers in list(_open):
        peers._exit()


atexit.register(_exit_all)
