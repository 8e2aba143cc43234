"""A parameter server: connections, the server's end of the protocol, and a journal, in one loop.

The hub's thread takes frames off the network; the thread that calls `run` takes them in the order in which they came,
writes down those that change the state, and lets `ServerEnd` decide what is sent.

On failure: a worker that is lost is waited for; the job ends with one error at all workers when too few are there for
longer than the patience. A server that is started again goes on from its checkpoint and journal.
"""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from gradwire.core.errors import FrameError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.protocol.handshake import JobKey, Member
from gradwire.protocol.parameters.server import Message, ServerEnd
from gradwire.server.journal import Journal
from gradwire.server.shard import Shard
from gradwire.transport.hub import Hub
from gradwire.transport.keys import job_epoch, job_key
from gradwire.wire.frame import FrameKind, Header

logger = logging.getLogger("gradwire")


@dataclass(frozen=True)
class ServerOptions:
    """How a parameter server runs.

    Attributes:
        workers: how many there are.
        host: address to listen at.
        port: port to listen at; 0 for any.
        job: name of the job; several may run on a machine.
        state: folder of checkpoint and journal; None keeps nothing.
        checkpoint_bytes: how long the journal grows before a checkpoint takes its place.
        timeout: how long a worker may be silent.
        patience: how long the job waits for workers that are lost.
        start_timeout: how long it waits until all workers have come.
        optimizers: import paths of optimizers beyond those of torch.optim.
        key_file: see `job_key`.
        insecure: see `job_key`.
    """

    workers: int
    host: str = "127.0.0.1"
    port: int = 0
    job: str = "gradwire"
    state: Path | None = None
    checkpoint_bytes: int = 1 << 28
    timeout: timedelta = timedelta(seconds=60)
    patience: timedelta = timedelta(seconds=120)
    start_timeout: timedelta = timedelta(seconds=600)
    optimizers: tuple[str, ...] = ()
    key_file: Path | None = None
    insecure: bool = False


@dataclass(frozen=True)
class _Frame:
    worker: int
    header: Header
    body: np.ndarray


@dataclass(frozen=True)
class _Left:
    worker: int
    error: SyncError | None


class ParameterServer:
    """One server.

    Args:
        options: see there.

    Attributes:
        address: where it listens.
        end: its end of the protocol.

    Raises:
        OptionError: it could be reached from other machines, and there is no key.
        OSError: the address is taken.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        key: JobKey = job_key(options.host, options.job, file=options.key_file, insecure=options.insecure)
        if options.insecure:
            logger.warning("The parameter server at %s takes workers without a secret key.", options.host)
        epoch = job_epoch(options.job)
        member = Member(options.job, options.workers, options.workers + 1, epoch)
        self.shard = Shard(options.optimizers)
        self.end = ServerEnd(options.workers, options.workers, epoch, self.shard)
        self._journal = (
            None if options.state is None else Journal(options.state, self.end, self.shard, options.checkpoint_bytes)
        )
        if self._journal is not None:
            self._journal.restore()
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=128)
        self.address: tuple[str, int] = (options.host, int(listener.getsockname()[1]))
        self._events: queue.SimpleQueue[_Frame | _Left] = queue.SimpleQueue()
        callers = frozenset(range(options.workers))
        self._hub = Hub(member, key, self, timeout=options.timeout, listener=listener, callers=callers)
        self._lost_since: float | None = None

    # -- on the hub's thread ---------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        self.end.admit(peer, header)

    def joined(self, peer: int) -> None:
        pass  # it says JOIN first

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self._events.put(_Frame(peer, header, body))

    def left(self, peer: int, error: SyncError | None) -> None:
        self._events.put(_Left(peer, error))

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, on_event: Callable[[str], None] = logger.info) -> None:
        """Serve until all workers have said goodbye.

        Args:
            on_event: told what happens, one line each.

        Raises:
            PeerTimeoutError: too few workers were there for longer than the patience.
            PeerLostError: a worker has finished, and others wait for it.
            DisagreementError: the workers differ in what they train.
        """
        self._hub.start()
        try:
            while len(self.end.finished) < self.options.workers:
                self._turn(on_event)
        except BaseException as error:
            self._hub.close(str(error) or type(error).__name__)
            raise
        finally:
            self._hub.close()
            if self._journal is not None:
                self._journal.close()

    def _turn(self, on_event: Callable[[str], None]) -> None:
        try:
            event = self._events.get(timeout=0.5)
        except queue.Empty:
            self._check_patience()
            return
        if isinstance(event, _Left):
            on_event(f"Worker {event.worker}: {event.error or 'finished'}")
            self._send(self.end.leave(event.worker, finished=event.error is None))
            if self._journal is not None:
                self._journal.note_leave(event.worker, finished=event.error is None)
        else:
            self._take(event, on_event)
        self._check_finished()
        self._check_patience()

    def _take(self, event: _Frame, on_event: Callable[[str], None]) -> None:
        if event.header.kind is FrameKind.JOIN:
            on_event(f"Worker {event.worker}: joined")
        try:
            messages = self.end.receive(event.worker, event.header, event.body)
        except FrameError as error:
            self._hub.dismiss(event.worker, str(error))
            return
        if self._journal is not None:
            self._journal.note(event.header, event.body)
        self._send(messages)
        while self.end.turned_away:
            self._hub.dismiss(*self.end.turned_away.popitem())

    def _send(self, messages: list[Message]) -> None:
        for worker, header, body in messages:
            self._hub.send(worker, header, body)

    def _check_patience(self) -> None:
        missing = [worker for worker in self.end.missing() if worker not in self.end.finished]
        if not missing:
            self._lost_since = None
            return
        all_came = len(self.end.incarnations) == self.options.workers
        patience = self.options.patience if all_came else self.options.start_timeout
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since > patience.total_seconds():
            raise PeerTimeoutError(
                f"Expected workers {missing} within {patience.total_seconds():g} s, got nothing of them. Look at their "
                "logs; start them again within the patience, or start the server with more of it.",
                rank=missing[0],
            )

    def _check_finished(self) -> None:
        """Workers that wait for one that has finished would wait for ever."""
        end = self.end
        if (
            not end.finished
            or end.agreement is None
            or self.options.workers - len(end.finished) >= end.agreement.needed
        ):
            return
        waiting = {worker for round_ in end.rounds for worker in round_.pushes} - end.finished
        if waiting:
            raise PeerLostError(
                f"Expected all workers to run as many steps, but workers {sorted(end.finished)} have finished and "
                f"{sorted(waiting)} have not. Do: give all the same number of batches.",
                rank=min(end.finished),
            )
