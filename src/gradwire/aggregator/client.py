"""A rank's client of an aggregation server: a hub connection, and datagrams where the server takes them.

The connection proves both ends, carries what is agreed, errors and goodbyes, and notices who is gone; packets go over
it as well unless the server offers datagrams. One thread of its own waits for timers and datagrams; what comes over the
connection is taken on the hub's thread; what is submitted goes out on the caller's.

Guarantees: as `Aggregation.submit` says. A connection that is lost is made again, and so is one to a server that was
started anew, within the timeout; what was not answered is sent again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from gradwire.aggregator.counters import PacketCounters
from gradwire.aggregator.handshake import MAX_WELCOME_BYTES, AggregatorJoin, AggregatorWelcome, check_size
from gradwire.aggregator.interface import Aggregation, Reply
from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.request import AggregationRequest
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.window import LEAST_WIDTH, Window
from gradwire.aggregator.worker import NO_EPOCH, WorkerStateMachine
from gradwire.core.errors import FrameError, PeerFailedError, PeerTimeoutError, SyncError
from gradwire.net.address import address_toward, parse_address, resolve, serve_command
from gradwire.net.datagrams import DatagramSocket
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameFlags, FrameKind, Header, describe

logger = logging.getLogger("gradwire")
WINDOW_BYTES = 2 << 20
"""Of packets under way over UDP, and of their results."""
GRACE_SECONDS = 5.0
"""By how much the server, which knows who is missing, gives up before a worker does."""
_BATCH = 64
_GOODBYE_SECONDS = 2.0


class AggregationClient(Aggregation):
    """One rank's client.

    Args:
        address: host and port of the server, or both as "host:port".
        terms: the same for all ranks.
        rank: of this one.
        job: name of the job.
        session: goes up with each start of the job's processes, the same for all ranks: rank 0's `time.time_ns()`, say.
            A server drops an older session for a newer one, and turns away who comes with an older one.
        timeout: how long the server may be silent, or not be there.
        stall_timeout: how long a result may wait for other ranks.
        window_bytes: what may be under way over UDP.
        key_file: see `job_key`.
        insecure: see `job_key`.

    Raises:
        OptionError: there is no key, and there must be; or terms with too many streams.
        SyncError: the server is not there in time, or does not take this rank.
    """

    def __init__(
        self, address: str | tuple[str, int], terms: SessionConfig, rank: int, *,
        job: str = "gradwire", session: int = 0,
        timeout: timedelta = timedelta(seconds=30), stall_timeout: timedelta = timedelta(seconds=300),
        window_bytes: int = WINDOW_BYTES, key_file: str | Path | None = None, insecure: bool = False,
    ) -> None:  # fmt: skip
        check_size(terms)
        self._server = parse_address(address) if isinstance(address, str) else address
        host = self._server[0]
        self.terms, self.rank = terms, rank
        self._start_with = serve_command("--aggregate", terms.world_size, self._server, job)
        self._timeout, self._stall = timeout.total_seconds(), stall_timeout.total_seconds()
        self._session, self._life = session, secrets.randbits(64)
        self._end = WorkerStateMachine(terms, rank)
        largest = max((terms.result_bytes(stream, 0) for stream in range(len(terms.streams))), default=1)
        self._most_bytes = PACKET_HEADER_BYTES + largest
        self._packets_in_window = max(LEAST_WIDTH, window_bytes // largest)
        self._futures: dict[AggregationRequest, Future[Reply]] = {}
        self._error: SyncError | None = None
        self._last_words = ""
        self._connected = False
        self._lost_at: float | None = time.monotonic()  # since when no server has welcomed this rank
        self._lost_by: SyncError | None = None
        self._welcome: AggregatorWelcome | None = None
        self._changed = threading.Condition(threading.RLock())
        key = job_key(host, job, file=key_file, insecure=insecure)
        self._server_ip = resolve(host)  # no packet waits for a name to be looked up
        self._datagrams = DatagramSocket((address_toward(self._server_ip), 0), key)
        self._group: DatagramSocket | None = None
        self._key = key
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._selector.register(self._datagrams.socket, selectors.EVENT_READ)
        self._epoch = job_epoch(job)
        self._hub = ReconnectingEndpoint(
            GroupMember(job, rank, terms.world_size + 1, self._epoch), key, self, timeout=timeout,
            call=(terms.world_size, self._server), start_with=self._start_with,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name=f"gradwire-aggregation-{rank}", daemon=True)
        self._hub.start()
        self._thread.start()
        self._wait_for_welcome()

    @property
    def counters(self) -> PacketCounters:
        """What has happened to packets so far; told to the log, too, when this is closed."""
        sources = [self._datagrams, *([] if self._group is None else [self._group])]
        return replace(self._end.counters, forged=sum(source.forged for source in sources))

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        """See `Aggregation`."""
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if self._error is not None:
                raise self._error
            deadline = time.monotonic() + self._stall + GRACE_SECONDS
            self._futures[self._end.submit(round_, stream, payload, out, flags, deadline)] = future
            self._send_due()
        self._wake()  # for its timers
        return future

    def close(self, reason: str = "") -> None:
        """See `Aggregation`."""
        with self._changed:  # a goodbye needs a connection
            self._changed.wait_for(lambda: self._lost_at is None or self._error is not None, _GOODBYE_SECONDS)
        closed = SyncError(f"Expected no more results: the aggregation client was closed. {reason}".rstrip())
        self._fail(closed, last_words=reason)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- on the hub's thread ---------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        """Let in a welcome, and packets of results."""
        most = MAX_WELCOME_BYTES if header.kind is FrameKind.WELCOME else self._most_bytes
        if header.kind not in (FrameKind.WELCOME, FrameKind.PACKET) or header.length > most:
            raise FrameError(f"Expected a packet of at most {most} bytes, got {describe(header)}, {header.length}.")

    def joined(self, peer: int) -> None:
        """A connection is there: say what this rank expects."""
        self._connected = True
        place = self._datagrams.address
        words = AggregatorJoin(self.terms, self._session, self._life, self._end.epoch, self._stall, place).to_bytes()
        header = Header(FrameKind.JOIN, sender=self.rank, epoch=self._epoch)
        self._hub.send(peer, header, np.frombuffer(words, np.uint8))

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """A welcome, or a packet."""
        if header.kind is FrameKind.PACKET:
            self._take(body)
            return
        try:
            welcome = AggregatorWelcome.from_bytes(body.tobytes())
        except FrameError as error:  # the next would be no better
            words = f"The aggregation server at {self._name} gave an answer that rank {self.rank} cannot read: {error}"
            self._fail(SyncError(words))
            return
        self._be_welcome(welcome)

    def left(self, peer: int, error: SyncError | None) -> None:
        """The connection is gone: it is called again, unless the server has ended."""
        with self._changed:
            self._connected = False
            self._lost_at = self._lost_at or time.monotonic()
        if error is None or isinstance(error, PeerFailedError):
            self._fail(SyncError(f"The aggregation server at {self._name} has ended: {error or 'it said goodbye'}"))
        elif self._error is None:
            self._lost_by = error
            limit = f"{self._timeout:g} s"
            logger.warning("The aggregation server at %s is called again for %s. %s", self._name, limit, error)

    def failed(self, error: SyncError) -> None:
        """Nothing comes from the server any more."""
        self._fail(error)

    def _be_welcome(self, welcome: AggregatorWelcome) -> None:
        with self._changed:
            lossy = welcome.port is not None
            if self._end.epoch == NO_EPOCH and lossy:
                self._end.window = Window(self._packets_in_window, random.Random(self._life))
            if lossy != (self._end.window is not None):
                self._fail(SyncError("Expected an aggregation server with or without --udp as before, got the other."))
                return
            self._datagrams.enter(welcome.epoch)
            try:
                self._enter_group(welcome)
                self._welcome = welcome
                self._lost_at = None
                for packet in self._end.joined(welcome.epoch, time.monotonic()):
                    self._send(packet)
            except SyncError as error:
                self._fail(error)
            self._changed.notify_all()
        self._wake()

    def _enter_group(self, welcome: AggregatorWelcome) -> None:
        if welcome.group is not None and self._group is None:
            try:
                self._group = DatagramSocket(welcome.group, self._key, shared=True)
                self._group.join(welcome.group[0], self._datagrams.address[0])
            except OSError as error:
                raise SyncError(
                    f"Rank {self.rank} cannot take results from the multicast group {welcome.group[0]}:"
                    f"{welcome.group[1]}: {error}. Start the server with another group, or without --multicast."
                ) from error
            self._selector.register(self._group.socket, selectors.EVENT_READ)
        if self._group is not None:
            self._group.enter(welcome.epoch)

    # -- its own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._error is None:
                self._turn()
        except Exception as error:  # whoever waits for a future is told
            self._break(error)
        with self._changed:
            waiting, self._futures = list(self._futures.values()), {}
        for future in waiting:
            future.set_exception(self._error)
        self._hub.close(self._last_words)
        logger.info("Aggregation at rank %d: packets: %s", self.rank, self.counters)
        for sock in (self._datagrams, self._group):
            if sock is not None:
                sock.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _turn(self) -> None:
        self._selector.select(self._patience())
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        self._hear(self._datagrams)
        if self._group is not None:
            self._hear(self._group)
        with self._changed:
            self._send_due()
            self._check_connection()

    def _patience(self) -> float:
        with self._changed:
            deadline = self._end.deadline()
        return 0.25 if deadline is None else max(0.0, min(0.25, deadline - time.monotonic()))

    def _hear(self, source: DatagramSocket) -> None:
        for datagram in source.receive(_BATCH):
            with contextlib.suppress(FrameError):  # counted
                self._take(datagram)

    def _check_connection(self) -> None:
        lost = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
        if lost > self._timeout:
            lack = "answer" if self._connected else "connection"
            said = [str(each) for each in (self._lost_by, self._hub.problem) if each]
            why = "" if self._connected else f"{'; '.join(said) or 'it was lost'}, "
            was_there = self._connected or self._lost_by is not None
            advice = "Look at its log." if was_there else f"Start it with: {self._start_with}"
            self._fail(
                PeerTimeoutError(
                    f"The aggregation server at {self._name} gave no {lack} for {self._timeout:g} s ({why}at rank "
                    f"{self.rank}). {advice}",
                    phase="aggregation",
                )
            )

    # -- packets ---------------------------------------------------------------------------------------------

    def _take(self, datagram: np.ndarray | memoryview) -> None:
        with self._changed:
            if self._error is not None:
                return
            try:
                done, packets = self._end.receive(datagram, time.monotonic())
            except SyncError as error:
                self._fail(error)
                return
            for packet in packets:
                self._send(packet)
            finished = [(self._futures.pop(submission), submission.reply()) for submission in done]
            self._send_due()
        for future, reply in finished:
            future.set_result(reply)

    def _send_due(self) -> None:
        try:
            for packet in self._end.poll(time.monotonic()):
                self._send(packet)
        except SyncError as error:
            self._fail(error)

    def _send(self, packet: np.ndarray) -> None:
        assert self._welcome is not None, "nothing goes out before the welcome"
        if self._welcome.port is not None:
            self._datagrams.send(packet, [(self._server_ip, self._welcome.port)])
            return
        header = Header(FrameKind.PACKET, sender=self.rank, epoch=self._epoch)
        self._hub.send(self.terms.world_size, header, packet)

    def _fail(self, error: SyncError, last_words: str | None = None) -> None:
        """End with an error: this client's own thread sees to the rest."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._last_words = str(error) if last_words is None else last_words
            self._changed.notify_all()
        self._wake()

    def _break(self, cause: Exception) -> None:
        """End because of what none of this has foreseen."""
        logger.error("A thread of the aggregation client at rank %d failed.", self.rank, exc_info=cause)
        error = SyncError(f"The aggregation client at rank {self.rank} failed: {cause!r}. The log says where.")
        error.__cause__ = cause
        self._fail(error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._wake_out.send(b"\0")

    def _wait_for_welcome(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._welcome is not None or self._error is not None)
            error = self._error
        if error is not None:
            self.close()
            raise error

    @property
    def _name(self) -> str:
        return f"{self._server[0]}:{self._server[1]}"
