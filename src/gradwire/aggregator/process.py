"""A stand-alone aggregation server: connections, datagrams, and the server's end of the protocol.

What comes over a connection is taken on the hub's thread, datagrams on one of their own, one at a time; the thread that
calls `run` watches for workers that are lost and results that wait too long.

On failure: a worker that is lost is waited for; whoever does not come back, gives up, finishes before the others or
holds up a result for too long ends the session, with one error at all workers that names it. A server that is started
again is sent everything that its predecessor has not answered; it has to keep nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, PacketCounters
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import MAX_JOIN_BYTES, NO_EPOCH, Address, AggregatorJoin, AggregatorWelcome
from gradwire.core.errors import (
    DisagreementError,
    FrameError,
    GradwireError,
    OptionError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    SyncError,
)
from gradwire.kernels.blocks import INDEX_CHUNK
from gradwire.net.datagrams import BUFFER_BYTES, MAX_PACKET_BYTES, DatagramSocket
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.net.stopping import Stoppable
from gradwire.wire.frame import FrameKind, Header, describe

logger = logging.getLogger("gradwire")
_TURN_SECONDS = 0.25
_BATCH = 64


@dataclass(frozen=True)
class AggregationOptions:
    """How an aggregation server runs.

    Attributes:
        workers: how many there are.
        host: address to listen at.
        port: port to listen at; 0 for any.
        job: name of the job; several may run on a machine.
        udp: take packets as datagrams, at the same port.
        multicast: group and port to which results are sent once for all; None sends each worker its own.
        drop: the fraction of datagrams that are dropped as they come, to try what losses do.
        buffer_bytes: asked of the system for datagrams that wait to be read.
        timeout: how long a worker may be silent.
        patience: how long a session waits for a worker that is lost; after a restart of the server, for all.
        start_timeout: how long it waits until all workers have come.
        key_file: see `job_key`.
        insecure: see `job_key`.
    """

    workers: int
    host: str = "127.0.0.1"
    port: int = 0
    job: str = "gradwire"
    udp: bool = False
    multicast: Address | None = None
    drop: float = 0.0
    buffer_bytes: int = BUFFER_BYTES
    timeout: timedelta = timedelta(seconds=30)
    patience: timedelta = timedelta(seconds=30)
    start_timeout: timedelta = timedelta(seconds=600)
    key_file: Path | None = None
    insecure: bool = False


class _Session:
    """The workers of one start of the job."""

    def __init__(self, number: int, aggregator: AggregatorStateMachine) -> None:
        self.number = number
        self.aggregator = aggregator
        self.clients: dict[int, int] = {}
        self.addresses: dict[int, Address] = {}
        self.present: set[int] = set()
        self.finished: set[int] = set()
        self.began = time.monotonic()
        self.lost_at: dict[int, float] = {}
        self.stall_seconds = float("inf")


class AggregationServer(Stoppable):
    """One server.

    Args:
        options: see there.

    Attributes:
        address: where it listens.

    Raises:
        OptionError: it could be reached from other machines, and there is no key; or multicast without datagrams, or
            to what is no group.
        OSError: the address is taken.
    """

    def __init__(self, options: AggregationOptions) -> None:
        self.options = options
        key = job_key(options.host, options.job, file=options.key_file, insecure=options.insecure)
        if options.insecure:
            logger.warning("The aggregation server at %s takes workers without a secret key.", options.host)
        if options.multicast is not None and not options.udp:
            raise OptionError("Expected datagrams where results are multicast. Do: pass udp=True (--udp).")
        if options.multicast is not None and not _is_group(options.multicast[0]):
            raise OptionError(
                f"Expected an IPv4 multicast group, got {options.multicast[0]!r}. Do: pass one of 239.0.0.0/8."
            )
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=128)
        self.address: Address = (options.host, int(listener.getsockname()[1]))
        self._datagrams = None
        if options.udp:
            self._datagrams = DatagramSocket(self.address, key, buffer_bytes=options.buffer_bytes)
            if options.multicast is not None:
                self._datagrams.multicast_from(self._datagrams.address[0])
        self._epoch = job_epoch(options.job)
        member = GroupMember(options.job, options.workers, options.workers + 1, self._epoch)
        callers = frozenset(range(options.workers))
        self._hub = ReconnectingEndpoint(member, key, self, timeout=options.timeout, listener=listener, callers=callers)
        self._session: _Session | None = None
        self._error: GradwireError | None = None
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._rng = random.Random(secrets.randbits(64))
        self._on_event: Callable[[str], None] = logger.info
        self._ended = False

    @property
    def counters(self) -> PacketCounters:
        """What has happened to packets in this session; forged datagrams belong to none, and all are counted."""
        found = PacketCounters() if self._session is None else self._session.aggregator.counters
        return replace(found, forged=0 if self._datagrams is None else self._datagrams.forged)

    def run(self, on_event: Callable[[str], None] = logger.info) -> None:
        """Serve until all workers of a session have said goodbye.

        Args:
            on_event: told what happens, one line each.

        Raises:
            PeerTimeoutError: a worker was not there, or held up a result, for too long.
            PeerLostError: a worker has finished, and others wait for it.
            DisagreementError: workers differ in their terms.
            SyncError: a worker has given up.
            ServerStoppedError: `stop` was called. Where all workers are waited for, a successor can go on.
        """
        self._on_event = on_event
        reader = threading.Thread(target=self._read_datagrams, name="gradwire-aggregation", daemon=True)
        self._hub.start()
        if self._datagrams is not None:
            reader.start()
        try:
            with self._changed:
                while not self._done():
                    self._changed.wait(_TURN_SECONDS)
                    self._check_stopped()
                    self._watch()
                on_event(f"Packets: {self.counters}")
        except BaseException as error:
            self._tell(self._hub, error, resumable=self._resumable())
            raise
        finally:
            self._hub.close()
            self._ended = True
            if self._datagrams is not None:
                reader.join()
                self._datagrams.close()

    # -- on the hub's thread ---------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        """Let in first words, and packets of those who have said them."""
        session = self._session
        most = MAX_JOIN_BYTES
        if header.kind is FrameKind.PACKET:
            most = 0 if session is None or peer not in session.present else session.aggregator.max_packet_bytes
        if header.kind not in (FrameKind.JOIN, FrameKind.PACKET) or header.length > most:
            raise FrameError(f"Expected a packet of at most {most} bytes, got {describe(header)}, {header.length}.")

    def joined(self, peer: int) -> None:
        """It says JOIN first."""

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """First words, or a packet."""
        try:
            with self._changed:
                if header.kind is FrameKind.JOIN:
                    self._join(peer, AggregatorJoin.from_bytes(body.tobytes()))
                elif self._session is not None and peer in self._session.present:
                    self._send(self._session.aggregator.receive(body, time.monotonic(), peer))
        except FrameError as error:
            self._hub.dismiss(peer, str(error))
        except DisagreementError as error:
            with self._changed:
                self._error = self._error or error

    def left(self, peer: int, error: SyncError | None) -> None:
        """A connection is gone."""
        with self._changed:
            session = self._session
            if session is None or peer not in session.present:
                return
            session.present.discard(peer)
            self._on_event(f"Worker {peer}: {error or 'finished'}")
            if error is None:
                session.finished.add(peer)
            elif isinstance(error, PeerFailedError):
                self._error = self._error or error
            else:
                session.lost_at[peer] = time.monotonic()
            self._changed.notify_all()

    def failed(self, error: SyncError) -> None:
        """No worker can be heard any more."""
        self._error = self._error or error

    # -- sessions --------------------------------------------------------------------------------------------

    def _join(self, worker: int, join: AggregatorJoin) -> None:
        session = self._session
        if session is None or join.session > session.number:
            session = self._begin(join)
        elif join.session < session.number:
            raise FrameError(
                f"Expected session {session.number} of the job, got worker {worker} of session {join.session}: the job "
                "has been started again. Do: end this process."
            )
        if join.config != session.aggregator.config:
            raise DisagreementError(
                f"Expected the same streams, tables and packets from all workers, got others from worker {worker}. Do: "
                "run one model, plan and version on all."
            )
        if session.clients.setdefault(worker, join.client) != join.client:
            raise FrameError(
                f"Expected one client of worker {worker} in session {session.number}, got a second. Do: start all "
                "workers again, with a higher session."
            )
        if join.epoch not in (NO_EPOCH, session.aggregator.epoch):
            session.aggregator.resumed = True
        session.addresses[worker] = join.address
        session.stall_seconds = min(session.stall_seconds, join.stall_seconds)
        session.present.add(worker)
        session.lost_at.pop(worker, None)
        self._on_event(f"Worker {worker}: joined")
        port = None if self._datagrams is None else self.address[1]
        words = AggregatorWelcome(session.aggregator.epoch, port, self.options.multicast).to_bytes()
        header = Header(FrameKind.WELCOME, sender=self.options.workers, epoch=self._epoch)
        self._hub.send(worker, header, np.frombuffer(words, np.uint8))

    def _begin(self, join: AggregatorJoin) -> _Session:
        config = join.config
        if config.world_size != self.options.workers:
            raise DisagreementError(
                f"This server was started for {self.options.workers} workers, and the job has {config.world_size}. "
                "Give both the same number."
            )
        sizes = [PACKET_HEADER_BYTES + config.result_bytes(stream, 0) for stream in range(len(config.streams))]
        if self._datagrams is not None and max(sizes, default=0) > MAX_PACKET_BYTES:
            fitting = config.packet_elements * (MAX_PACKET_BYTES - 256) // max(sizes) // INDEX_CHUNK * INDEX_CHUNK
            blocks = ", with a compressor whose block is no longer," if config.needed < config.world_size else ""
            raise DisagreementError(
                f"Expected results that fit a datagram of {MAX_PACKET_BYTES} bytes, got {max(sizes)}. Do: pass "
                f"packet_elements={fitting} or less{blocks or ','} or start the server without --udp."
            )
        aggregator = AggregatorStateMachine(config, 1 + secrets.randbits(63), acknowledges=self._datagrams is not None)
        if self._datagrams is not None:
            self._datagrams.enter(aggregator.epoch)
        if self._session is not None:
            for worker in self._session.present:
                self._hub.dismiss(worker, f"Expected session {join.session}: the job has been started again.")
        self._session = _Session(join.session, aggregator)
        return self._session

    def _done(self) -> bool:
        return self._session is not None and len(self._session.finished) == self.options.workers

    def _resumable(self) -> bool:
        """Whether another server could go on: one that may answer without stragglers would count others."""
        config = None if self._session is None else self._session.aggregator.config
        return config is None or config.needed == config.world_size

    def _watch(self) -> None:
        """Raise what ends the session."""
        if self._error is not None:
            raise self._error
        session, now = self._session, time.monotonic()
        present = set() if session is None else session.present | session.finished
        lost = [worker for worker in range(self.options.workers) if worker not in present]
        for worker in lost:
            self._watch_lost(session, worker, lost, now)
        if session is not None:
            self._watch_results(session, now)

    def _watch_lost(self, session: _Session | None, worker: int, lost: list[int], now: float) -> None:
        since = self._started if session is None else session.lost_at.get(worker, session.began)
        known = session is not None and (session.aggregator.resumed or worker in session.lost_at)
        patience = (self.options.patience if known else self.options.start_timeout).total_seconds()
        if now - since > patience:
            raise PeerTimeoutError(
                f"Expected workers {lost} within {patience:g} s, got nothing of them. Do: look at their logs; start "
                "all workers again.",
                rank=worker,
            )

    def _watch_results(self, session: _Session, now: float) -> None:
        waiting = session.aggregator.oldest_open()
        if waiting is None:
            return
        gone = session.finished.intersection(waiting.missing)
        if gone:
            raise PeerLostError(
                f"Expected all workers to run as many rounds, but workers {sorted(gone)} have finished and others wait "
                f"for them in round {waiting.key.round}. Do: give all the same number of batches.",
                rank=min(gone),
            )
        if now - waiting.since > session.stall_seconds:
            raise PeerTimeoutError(
                f"Expected round {waiting.key.round} of stream {waiting.key.stream} from workers {waiting.missing} "
                f"within {session.stall_seconds:g} s of the first, got nothing. Do: look at their logs.",
                rank=waiting.missing[0],
                phase=f"round {waiting.key.round}",
            )

    # -- packets ---------------------------------------------------------------------------------------------

    def _read_datagrams(self) -> None:
        assert self._datagrams is not None, "started with datagrams alone"
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._datagrams.socket, selectors.EVENT_READ)
                while not self._ended:
                    if selector.select(_TURN_SECONDS):
                        self._take_datagrams(self._datagrams)
        except Exception as error:
            logger.exception("The thread of an aggregation server failed.")
            self._error = SyncError(f"Expected the aggregation server to run on, got {error!r}. Look at its log.")

    def _take_datagrams(self, datagrams: DatagramSocket) -> None:
        for packet in datagrams.receive(_BATCH):  # what is forged ends there, and does not take the lock
            with self._changed, contextlib.suppress(FrameError):  # counted
                if self._session is not None:
                    self._take_datagram(self._session.aggregator, packet)
        with self._changed:
            if self._session is not None:
                self._send(self._session.aggregator.flush())

    def _take_datagram(self, aggregator: AggregatorStateMachine, packet: memoryview) -> None:
        if self._rng.random() < self.options.drop:
            aggregator.counters.dropped += 1
            return
        self._send(aggregator.receive(packet, time.monotonic()))

    def _send(self, messages: list[PacketToSend]) -> None:
        assert self._session is not None, "only sessions have something to say"
        for worker, packet in messages:
            if self._datagrams is None:
                header = Header(FrameKind.PACKET, sender=self.options.workers, epoch=self._epoch)
                for each in list(self._session.present) if worker == EVERYONE else [worker]:
                    self._hub.send(each, header, packet)
            elif worker != EVERYONE:
                found = self._session.addresses.get(worker)  # None for one that has not joined yet
                self._datagrams.send(packet, [] if found is None else [found])
            elif self.options.multicast is not None:
                self._datagrams.send(packet, [self.options.multicast])
            else:
                self._datagrams.send(packet, self._session.addresses.values())


def _is_group(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_multicast
    except ValueError:
        return False
