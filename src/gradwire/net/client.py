"""A worker's end of its connection to a server: what all kinds of servers have in common.

On failure: a lost server, or its successor, is called again. The client fails if there is none for the timeout, if
connections are lost again and again without a result, if the server says that it has ended, or if its answer cannot be
read. It keeps the first error for all who wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from gradwire.core.errors import FrameError, PeerFailedError, PeerTimeoutError, SyncError
from gradwire.net.address import serve_command
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.liveness import STALL_TIMEOUT
from gradwire.net.reconnecting import EndpointOwner, ReconnectingEndpoint
from gradwire.net.tls import TlsFiles
from gradwire.wire.frame import FrameKind, Header

logger = logging.getLogger("gradwire")
GRACE_SECONDS = 5.0
"""How long before a worker the server gives up, since only the server knows who is missing."""
GOODBYE_SECONDS = 2.0
"""How long a client that is closed waits for a connection to say goodbye on."""
MAX_LOSSES = 10
"""Connections that may be lost one after another, without a result of the server between them.

A client gives up after them, but not before its timeout. While a server saves its state, it may not answer for long.
If an older process of the same worker calls as well, each of the two takes the other's place until the server refuses
the older one.
"""
Welcome = TypeVar("Welcome")


@dataclass(frozen=True)
class ConnectionOptions:
    """Key and timeouts of the connections to servers.

    Attributes:
        key_file: File with the job key. See `gradwire.net.keys.job_key`.
        insecure: Whether to connect beyond loopback without a secret key.
        timeout: Longest time without a sign of life from a server. A server that is not there is called for as long.
        stall_timeout: Longest time that a live worker or server may take to deliver a result that others wait for; see
            `gradwire.net.liveness.STALL_TIMEOUT`. The server ends the job, with an error that names the worker; a
            client waits `GRACE_SECONDS` longer, in case it is the server that hangs.
        integrity: How frames are protected, ``"crc"`` or ``"mac"``; the same on server and workers. Default: ``"mac"``
            if a job key is given and there is no TLS, else ``"crc"``. See `gradwire.net.handshake`.
        tls: Certificates, if the server uses TLS. Its own must name the host in its address.
    """

    key_file: str | Path | None = None
    insecure: bool = False
    timeout: timedelta = timedelta(seconds=120)
    stall_timeout: timedelta = STALL_TIMEOUT
    integrity: str | None = None
    tls: TlsFiles | None = None


class Client(EndpointOwner):
    """Base of the workers' ends. It owns the endpoint that calls the server, and calls it again whenever it is lost.

    Args:
        address: Host and port of the server.
        rank: Rank of this worker.
        world_size: Number of workers. The server has the rank after theirs.
        job: Name of the job.
        options: Key and timeouts.

    Attributes:
        rank: The same.

    Raises:
        OptionError: The job key is missing, or the timeout is too short.
    """

    kind: ClassVar[str]
    """What the server is, for messages."""
    serve_option: ClassVar[str]
    """Option of ``gradwire serve`` that starts such a server."""

    def __init__(
        self, address: tuple[str, int], rank: int, world_size: int, job: str, options: ConnectionOptions
    ) -> None:
        self.rank = rank
        self._server = world_size
        self._server_name = f"{self.kind} at {address[0]}:{address[1]}"
        self._start_with = serve_command(self.serve_option, world_size, address, job)
        self._options = options
        self._error: SyncError | None = None
        self._connected = False
        self._lost_at: float | None = time.monotonic()  # set to None by a subclass once it has a server
        self._lost_by: SyncError | None = None
        self._num_losses = 0  # since the last result
        self._first_loss = 0.0  # of those, when
        self._changed = threading.Condition()
        self._epoch = job_epoch(job)
        integrity = options.integrity or ("crc" if options.tls else None)  # TLS does what tags do
        self._key = job_key(address[0], job, file=options.key_file, insecure=options.insecure, integrity=integrity)
        self._endpoint = ReconnectingEndpoint(
            GroupMember(job, rank, world_size + 1, self._epoch), self._key, self, timeout=options.timeout,
            call=(world_size, address), start_with=self._start_with,
            tls=None if options.tls is None else options.tls.context(server=False),
        )  # fmt: skip

    def left(self, peer: int, error: SyncError | None) -> None:
        with self._changed:
            self._connected = False
            self._lost_at = self._lost_at or time.monotonic()
            if isinstance(error, PeerFailedError):
                self._fail(SyncError(f"The {self._server_name} has ended: {error}"))
            elif error is not None and self._error is None:
                self._lost_by = error
                self._first_loss = self._first_loss if self._num_losses else time.monotonic()
                self._num_losses += 1
                self._call_again_or_fail(error)
            self._changed.notify_all()

    def _call_again_or_fail(self, error: SyncError) -> None:
        limit = self._options.timeout.total_seconds()
        if self._num_losses >= MAX_LOSSES and time.monotonic() - self._first_loss >= limit:
            self._fail(SyncError(
                f"The {self._server_name} gave rank {self.rank} no result on {self._num_losses} connections, one after "
                f"another. Look at its log. The last connection: {error}"
            ))  # fmt: skip
            self._endpoint.close(str(self._error))
            return
        logger.warning("The %s is called again for %g s. %s", self._server_name, limit, error)

    def failed(self, error: SyncError) -> None:
        self._fail(error)

    def _fail(self, error: SyncError) -> None:
        """Record the first error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait_for_goodbye(self) -> None:
        """Wait a little until this end is connected: a goodbye needs a connection, which may just be made again."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost_at is None or self._error is not None, GOODBYE_SECONDS)

    def _send_frame(self, kind: FrameKind, body: bytes | np.ndarray) -> None:
        """Send a frame that says no more than its kind and body, if there is a connection."""
        self._endpoint.send(self._server, *self._frame(kind, body))

    def _frame(self, kind: FrameKind, body: bytes | np.ndarray) -> tuple[Header, np.ndarray]:
        """A frame that says no more than its kind and body."""
        return Header(kind, sender=self.rank, epoch=self._epoch), np.frombuffer(body, np.uint8)

    def _read_welcome(self, parse: Callable[[bytes], Welcome], body: np.ndarray) -> Welcome | None:
        """Parse the server's answer; None and failure if it cannot be read, since no later one would be better."""
        try:
            return parse(body.tobytes())
        except FrameError as error:
            self._fail(SyncError(f"The {self._server_name} gave an answer that this worker cannot read: {error}"))
            return None

    def _check_lost(self, phase: str) -> None:
        """Raise `PeerTimeoutError` if there has been no server for the timeout; `phase` is what waits for it."""
        limit = self._options.timeout.total_seconds()
        if self._lost_at is None or time.monotonic() - self._lost_at <= limit:
            return
        missing, causes = "answer", ""
        if not self._connected:
            problems = [str(each) for each in (self._lost_by, self._endpoint.problem) if each]
            missing, causes = "connection", f" ({'; '.join(problems)})" if problems else ""
        was_there = self._connected or self._lost_by is not None
        advice = "Look at its log." if was_there else f"Start it with: {self._start_with}"
        raise PeerTimeoutError(
            f"The {self._server_name} gave rank {self.rank} no {missing} for {limit:g} s{causes}. {advice}",
            phase=phase,
        )
