"""A server process: it listens, serves the workers of a job until all have finished, and can be stopped.

On failure: `run` raises, and all workers are told why at once. Their jobs end with that, unless the server went away in
a way that lets a successor take over: then they call for the successor until their timeouts.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from gradwire.core.counts import Count
from gradwire.core.errors import PeerLostError, PeerTimeoutError, ServerStoppedError
from gradwire.net.acceptor import BACKLOG
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import EndpointOwner, ReconnectingEndpoint
from gradwire.net.tls import TlsFiles

logger = logging.getLogger("gradwire")


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens and waits.

    Attributes:
        workers: Number of workers of the job.
        host: Address to listen on. Beyond loopback, a job key is required.
        port: Port to listen on; 0 for any free one.
        job: Name of the job. A machine can serve several jobs.
        timeout: Longest time without a sign of life from a worker.
        patience: Longest wait for a worker that is lost or was refused.
        start_timeout: Longest wait until all workers have joined.
        key_file: File with the job key. See `job_key`.
        insecure: Whether to listen beyond loopback without a secret key.
        integrity: How frames are protected, ``"crc"`` or ``"mac"``; the same on server and workers. Default: ``"mac"``
            if a job key is given and there is no TLS, else ``"crc"``. See `gradwire.net.handshake`.
        tls: Certificates, for connections under TLS; the workers need theirs, too.
    """

    workers: int
    host: str = "127.0.0.1"
    port: int = 0
    job: str = "gradwire"
    timeout: timedelta = timedelta(seconds=60)
    patience: timedelta = timedelta(seconds=120)
    start_timeout: timedelta = timedelta(seconds=600)
    key_file: Path | None = None
    insecure: bool = False
    integrity: str | None = None
    tls: TlsFiles | None = None


class Server(EndpointOwner):
    """Base of the servers. It owns the endpoint that all workers connect to.

    Args:
        options: How the server listens and waits.

    Attributes:
        address: Host and port that the server listens on.

    Raises:
        OptionError: Other machines can reach the address, and there is no key; or a file of keys or certificates is
            no use.
        OSError: The address is taken.
    """

    address: tuple[str, int]
    _endpoint: ReconnectingEndpoint
    _stopped: ServerStoppedError | None = None
    _for_good = True

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        integrity = options.integrity or ("crc" if options.tls else None)  # TLS does what tags do
        self._key = job_key(
            options.host, options.job, file=options.key_file, insecure=options.insecure, integrity=integrity
        )
        self._tls = None if options.tls is None else options.tls.context(server=True)
        if options.insecure:
            logger.warning("The server at %s accepts workers without a secret key.", options.host)
        self._epoch = job_epoch(options.job)
        self._refused: dict[int, tuple[float, str]] = {}  # absent workers: when, and why
        self._on_event: Callable[[str], None] = logger.info
        self._created = time.monotonic()

    def run(self, on_event: Callable[[str], None] = logger.info) -> None:
        """Serve until all workers have said goodbye.

        Args:
            on_event: Called with one line of text for each event, which waits until it returns.

        Raises:
            PeerTimeoutError: A worker was away, or held up the others, for too long; or it was refused.
            PeerLostError: A worker has finished, and others wait for it.
            SyncError: A worker has given up.
            ServerStoppedError: `stop` was called.
        """
        self._on_event = on_event
        self._endpoint.start()
        done = False
        try:
            self._serve()
            done = True
        except BaseException as error:
            returns = error is self._stopped and not self._for_good and self._resumable()
            self._endpoint.close(str(error) or type(error).__name__, for_good=not returns)
            raise
        finally:
            self._endpoint.close()
            self._release(done)

    def stop(self, reason: str, *, for_good: bool = True) -> None:
        """Make `run` raise `ServerStoppedError` soon. Call it from any thread, or from a signal handler.

        Args:
            reason: Why; the workers are told.
            for_good: If false, workers wait for a successor that can continue. Otherwise, their jobs end.
        """
        self._for_good = for_good
        self._stopped = ServerStoppedError(reason)

    def counts(self) -> list[Count]:
        """Return what monitoring shows. Call it from any thread, until the server has ended."""
        present, finished = self._workers()
        return [
            Count("workers", "Workers of the job.", self.options.workers),
            Count("workers_finished", "Workers that have said goodbye.", len(finished)),
            Count("uptime_seconds", "Time since the server was started.", time.monotonic() - self._created),
            Count("sent_bytes_total", "Bytes of frames sent over TCP, headers included.", self._endpoint.sent_bytes),
            Count("received_bytes_total", "Bytes of frames received over TCP.", self._endpoint.received_bytes),
            *(
                Count("worker_present", "1 if the worker has joined and is connected.", worker in present, _of(worker))
                for worker in range(self.options.workers)
            ),
        ]

    @abstractmethod
    def _workers(self) -> tuple[Collection[int], Collection[int]]:
        """Workers that have joined and not left, and those that have finished."""

    def joined(self, peer: int) -> None:
        """Workers speak first."""

    @abstractmethod
    def _serve(self) -> None:
        """Serve until all workers have finished, and call `_check_stopped` often."""

    @abstractmethod
    def _resumable(self) -> bool:
        """Whether a successor could continue."""

    @abstractmethod
    def _release(self, done: bool) -> None:
        """Release what this server holds, after an error or when all workers have finished."""

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _refuse(self, worker: int, reason: str, connection: int | None = None, *, present: bool = False) -> None:
        """Close a worker's connection and tell it why; `present` if the worker takes part over another one."""
        if not present:
            self._refused[worker] = time.monotonic(), reason
        self._endpoint.dismiss(worker, reason, connection)

    def _check_refused(self, missing: Collection[int]) -> None:
        """Raise if one of the missing workers was refused longer than the patience ago: the others wait for it."""
        for worker, (at, reason) in list(self._refused.items()):
            if worker in missing and time.monotonic() - at > self.options.patience.total_seconds():
                raise PeerTimeoutError(
                    f"Worker {worker} was refused, and has not come back within "
                    f"{self.options.patience.total_seconds():g} s. It was told: {reason}",
                    rank=worker,
                )

    def _listen(self, prepare: Callable[[], None]) -> None:
        """Take the address, then `prepare`, then make the endpoint. After an error, the address is free."""
        options = self.options
        with contextlib.ExitStack() as undo:
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
            undo.enter_context(listener)
            self.address = (options.host, int(listener.getsockname()[1]))
            prepare()
            member = GroupMember(options.job, options.workers, options.workers + 1, self._epoch)
            self._endpoint = ReconnectingEndpoint(
                member, self._key, self, timeout=options.timeout, listener=listener,
                callers=frozenset(range(options.workers)), tls=self._tls,
            )  # fmt: skip
            undo.pop_all()


def _of(worker: int) -> tuple[tuple[str, str], ...]:
    return (("worker", str(worker)),)


def away(workers: list[int], patience: timedelta, rank: int) -> PeerTimeoutError:
    """The error for workers that did not come, or not come back; `rank` has been away for longest."""
    return PeerTimeoutError(
        f"Workers {workers} were away for {patience.total_seconds():g} s. Look at their logs and start the job again. "
        "With a longer --patience, the server waits longer.",
        rank=rank,
    )


def stalled(workers: list[int], what: str, seconds: float) -> PeerTimeoutError:
    """The error for workers that hold up the others."""
    return PeerTimeoutError(
        f"Workers {workers} did not send {what} within {seconds:g} s of the first worker. Look at their logs.",
        rank=workers[0] if workers else None,
        phase=what,
    )


def finished_early(finished: Collection[int], what: str) -> PeerLostError:
    """The error for workers that have finished, while others wait for them."""
    return PeerLostError(
        f"Workers {sorted(finished)} have finished, but others wait for their {what}. Give all workers the same number "
        "of batches.",
        rank=min(finished),
    )


@contextmanager
def stopped_by_signals(server: Server) -> Iterator[list[int]]:
    """Let SIGINT stop a server for good, and SIGTERM so that a successor can take over.

    A second signal does what it did before.

    Returns:
        The signals that have arrived.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        received.append(number)
        name = signal.Signals(number).name
        server.stop(f"The server was stopped by {name}.", for_good=number == signal.SIGINT)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()
