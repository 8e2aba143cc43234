"""A stand-alone aggregation server: connections, datagrams, and the state machine.

One thread receives packets and owns the sums, so no packet waits for a lock: over TCP the endpoint's thread, over UDP
one that only reads datagrams. Joins and goodbyes come on the endpoint's thread, which replaces what the other reads.
They share a lock with the thread that calls `run`, which watches for lost workers and for results that take too long. A
second receiving thread would make a server slower (`benchmarks/micro/receiving_threads.py`); a second server does not.

On failure: a lost worker is waited for. A worker that stays away, gives up, finishes before the others or holds up a
result for too long ends the session, with one error at all workers that names it. A server that is started again keeps
nothing: workers send it everything that its predecessor has not answered.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gradwire.aggregator.datagram_keys import WorkerDatagrams, group_key
from gradwire.aggregator.multicast import ResultHashes
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, PacketCounters
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import (
    MAX_JOIN_BYTES,
    NO_EPOCH,
    Address,
    AggregatorJoin,
    AggregatorWelcome,
    SessionConfig,
)
from gradwire.aggregator.xdp.kernel_slots import KernelSlots, prepare
from gradwire.aggregator.xdp.layout import Layout
from gradwire.aggregator.xdp.loader import BROADCAST
from gradwire.aggregator.xdp.seals import keys
from gradwire.aggregator.xdp.server import KernelStateMachine, XdpInterface, check_frames, check_waits
from gradwire.core import threads
from gradwire.core.counts import Count
from gradwire.core.errors import (
    DisagreementError,
    FrameError,
    GradwireError,
    OptionError,
    PeerFailedError,
    RightsError,
    SyncError,
)
from gradwire.kernels.blocks import INDEX_CHUNK
from gradwire.net.datagrams import MAX_PACKET_BYTES, DatagramReceiver, DatagramSender, DatagramSocket
from gradwire.net.server import Server, away, finished_early, stalled
from gradwire.wire.frame import FrameKind, Header, describe

logger = logging.getLogger("gradwire")
MAX_EARLIER = 1024
"""Number of earlier sessions that are remembered."""
_TURN_SECONDS = 0.25
_DATAGRAMS_PER_READ = 64
_PACKETS = (
    "Packets of this session by what has happened to them, and by whether the kernel or the server has seen them."
)


@dataclass
class _Session:
    """The workers of one start of the job."""

    number: int
    machine: AggregatorStateMachine
    clients: dict[int, int] = field(default_factory=dict)  # number that each worker's client has drawn
    datagrams: dict[Address, WorkerDatagrams] = field(default_factory=dict)  # by where they come from
    group: DatagramSender | None = None
    hashes: ResultHashes = field(default_factory=ResultHashes)  # of what went to the group
    present: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    lost_at: dict[int, float] = field(default_factory=dict)
    stall_seconds: float = float("inf")
    kernel: KernelSlots | None = None
    latest: int = NO_EPOCH  # epoch of the last incarnation that has begun the session or welcomed one of its workers


class AggregationServer(Server):
    """One server. See `Server`.

    Args:
        options: How the server runs.

    Raises:
        OptionError: The options do not go together.
    """

    options: AggregationOptions

    def __init__(self, options: AggregationOptions) -> None:
        super().__init__(options)
        options.check()
        self._datagrams: DatagramSocket | None = None
        self._interface: XdpInterface | None = None
        self._prepared: Layout | None = None  # whose programs are compiled
        self._reader = threads.make("gradwire-datagrams", self._read_datagrams, self.failed)
        self._session: _Session | None = None
        self._earlier: deque[int] = deque(maxlen=MAX_EARLIER)  # numbers of the sessions before it
        self._error: GradwireError | None = None
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._rng = random.Random(secrets.randbits(64))
        self._ended = False
        self._num_forged = self._num_replayed = 0
        try:
            self._listen(self._open_datagrams)
        except BaseException:
            self._release(done=False)
            raise

    @property
    def counters(self) -> PacketCounters:
        """What has happened to the packets of this session, and the number of all forged datagrams."""
        session = self._session
        return self._in_server(PacketCounters() if session is None else session.machine.total_counters())

    def counts(self) -> list[Count]:
        with self._changed:
            session = self._session
            in_server = PacketCounters() if session is None else session.machine.counters
            places = {"server": self._in_server(in_server)}
            if session is not None and session.kernel is not None:
                places["kernel"] = session.kernel.counted()
            oldest = None if session is None else session.machine.oldest_open()
            num_sessions = len(self._earlier) + (session is not None)
        waited = 0.0 if oldest is None else time.monotonic() - oldest.since
        return [
            *super().counts(),
            Count("sessions", "Starts of the job that this server knows.", num_sessions),
            Count("open_result_seconds", "Age of the oldest result that waits for a worker.", waited),
            *(
                Count("packets_total", _PACKETS, count, (("kind", kind), ("place", place)))
                for place, counted in places.items()
                for kind, count in vars(counted).items()
            ),
        ]

    def _workers(self) -> tuple[Collection[int], Collection[int]]:
        session = self._session
        return ((), ()) if session is None else (set(session.present), set(session.finished))

    def _in_server(self, counters: PacketCounters) -> PacketCounters:
        forged, replayed = counters.forged + self._num_forged, counters.replayed + self._num_replayed
        return replace(counters, forged=forged, replayed=replayed)

    def _open_datagrams(self) -> None:
        if self.options.udp:
            self._datagrams = DatagramSocket(self.address)
            if self.options.multicast is not None:
                self._datagrams.multicast_from(self._datagrams.address[0])
        if self.options.xdp is not None:
            self._interface = XdpInterface(self.options.xdp, self.options.xdp_mode)
            self._prepared = prepare(
                self.options.workers, self._interface.mtu, self.options.guard, self.address[1],
                broadcast=self.options.xdp_mode == BROADCAST,
            )  # fmt: skip

    def _serve(self) -> None:
        if self._datagrams is not None:
            self._reader.start()
        with self._changed:
            while self._session is None or len(self._session.finished) < self.options.workers:
                self._changed.wait(_TURN_SECONDS)
                self._check_stopped()
                self._check_session()
                if self._session is not None and isinstance(self._session.machine, KernelStateMachine):
                    self._send_over_tcp(self._session.machine.questions())
            self._on_event(f"Packets: {self.counters}")

    def _resumable(self) -> bool:
        """Whether a successor would count the same workers: not if results may leave out stragglers."""
        config = None if self._session is None else self._session.machine.config
        return config is None or config.needed == config.world_size

    def _release(self, done: bool) -> None:
        self._ended = True
        if self._datagrams is not None:
            threads.end(self._reader)
            self._datagrams.close()
        if self._interface is not None:
            self._interface.close()
            if self._session is not None and self._session.kernel is not None:
                self._session.kernel.close()

    # -- on the endpoint's thread ----------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        """Admit first messages, and packets of workers that have joined, unless they travel as datagrams."""
        session = self._session
        most = MAX_JOIN_BYTES
        if header.kind is FrameKind.PACKET:
            takes = session is not None and peer in session.present and self._datagrams is None
            most = session.machine.max_packet_bytes if session is not None and takes else 0
        if header.kind not in (FrameKind.JOIN, FrameKind.PACKET) or header.length > most:
            raise FrameError(f"Expected a packet of at most {most} bytes, got {describe(header)}, {header.length}.")

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        try:
            if header.kind is FrameKind.JOIN:
                join = AggregatorJoin.from_bytes(body.tobytes())
                with self._changed:
                    self._join(peer, join)
            elif self._session is not None and peer in self._session.present:
                self._send(self._session, self._session.machine.receive(body, time.monotonic(), peer))
        except _EarlierSessionError as error:
            self._endpoint.dismiss(peer, str(error))  # the session does not wait for it
        except (FrameError, DisagreementError, OptionError, RightsError) as error:
            present = self._session is not None and peer in self._session.present
            self._refuse(peer, str(error), present=present)

    def left(self, peer: int, error: SyncError | None) -> None:
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
        self._error = self._error or error

    # -- sessions --------------------------------------------------------------------------------------------

    def _join(self, worker: int, join: AggregatorJoin) -> None:
        session, datagrams = self._session, None
        derive = partial(self._endpoint.derive, worker)
        if self._datagrams is not None:
            datagrams = WorkerDatagrams.join(worker, join.address, self._endpoint.host(worker), derive)
            datagrams.round_trip_seconds = self._endpoint.round_trip_seconds(worker)
        if session is None or join.session != session.number:
            if join.session in self._earlier or (session is not None and NO_EPOCH < join.epoch < session.latest):
                again = f"The job of worker {worker} has been started again since. End this process."
                raise _EarlierSessionError(again)
            session = self._begin(worker, join)
        if join.config != session.machine.config:
            raise FrameError(
                f"Worker {worker} expects other streams, tables or packets than the others. Run one model, plan and "
                "version on all workers."
            )
        if session.clients.setdefault(worker, join.client) != join.client:
            raise FrameError(
                f"Worker {worker} has a second client in session {session.number}. Start all workers again, with "
                "another session."
            )
        if join.epoch not in (NO_EPOCH, session.machine.epoch):
            session.machine.resumed = True
        session.latest = max(session.latest, join.epoch if join.epoch != NO_EPOCH else session.machine.epoch)
        if datagrams is not None:
            if isinstance(session.machine, KernelStateMachine):
                session.machine.take_worker(datagrams, keys(derive), self.options.guard)
            self._take_address(session, datagrams)
        session.stall_seconds = min(session.stall_seconds, join.stall_seconds)
        session.present.add(worker)
        session.lost_at.pop(worker, None)
        self._refused.pop(worker, None)
        self._on_event(f"Worker {worker}: joined")
        port = None if self._datagrams is None else self.address[1]
        guard = self.options.guard if session.kernel is not None else ""
        welcome = AggregatorWelcome(session.machine.epoch, port, self.options.multicast, guard).to_bytes()
        self._endpoint.send(worker, self._header(FrameKind.WELCOME), np.frombuffer(welcome, np.uint8))
        self._send_over_tcp(session.machine.rejoined(worker))  # since nothing may have proven its address yet

    def _header(self, kind: FrameKind) -> Header:
        return Header(kind, sender=self.options.workers, epoch=self._epoch)

    def _take_address(self, session: _Session, made: WorkerDatagrams) -> None:
        before = session.datagrams.get(made.address)
        made.validated = before is not None and before.worker == made.worker and before.validated
        kept = {where: each for where, each in session.datagrams.items() if each.worker != made.worker}
        session.datagrams = {**kept, made.address: made}

    def _begin(self, worker: int, join: AggregatorJoin) -> _Session:
        self._check_config(join.config)
        self._check_other_job(worker, join)
        before = NO_EPOCH if self._session is None else max(self._session.latest, self._session.machine.epoch)
        epoch, kernel = max(_new_epoch(), before + 1), self._begin_in_kernel(join.config)
        if kernel is None:
            machine = AggregatorStateMachine(join.config, epoch, acknowledges=self._datagrams is not None)
        else:
            machine = KernelStateMachine(join.config, epoch, kernel)
        self._refused.clear()  # whoever was refused in an earlier session is not missed for that in this one
        if self._session is not None:
            self._earlier.append(self._session.number)
            reason = "The job has been started again since. End this process."
            for each in self._session.present:
                self._endpoint.dismiss(each, reason)
            if self._session.kernel is not None:
                self._session.kernel.close()
        self._session = _Session(join.session, machine, kernel=kernel)
        if self.options.multicast is not None:
            self._session.group = DatagramSender(group_key(self._key, machine.epoch))
        return self._session

    def _begin_in_kernel(self, config: SessionConfig) -> KernelSlots | None:
        if self._interface is None:
            return None
        check_waits(config)
        check_frames(config, self._interface)
        broadcast = self.options.xdp_mode == BROADCAST
        slots = KernelSlots(config, self.options.guard, self.address[1], self._prepared, broadcast=broadcast)
        self._interface.run(slots)
        total = sum(config.num_packets(stream) for stream in range(len(config.streams)))
        self._on_event(f"The kernel adds up {sum(slots.streams)} of {total} packets at {self._interface.name}")
        return slots

    def _check_other_job(self, worker: int, join: AggregatorJoin) -> None:
        """Refuse another job. Another start of this job comes when its workers are gone."""
        session, num_others = self._session, self.options.workers - 1
        if session is None or join.config == session.machine.config:
            return
        if num_others and len(session.present - {worker}) == num_others:
            raise FrameError(
                f"Worker {worker} belongs to another job: all other workers are connected, in another session and with "
                "another configuration. Give each job a name or a server of its own."
            )

    def _check_config(self, config: SessionConfig) -> None:
        if config.world_size != self.options.workers:
            raise FrameError(
                f"A worker expects {config.world_size} workers, but this server was started for "
                f"{self.options.workers}. Start both with the same number."
            )
        sizes = [PACKET_HEADER_BYTES + config.result_bytes(stream, 0) for stream in range(len(config.streams))]
        if self._datagrams is not None and max(sizes, default=0) > MAX_PACKET_BYTES:
            fitting = config.packet_elements * (MAX_PACKET_BYTES - 256) // max(sizes) // INDEX_CHUNK * INDEX_CHUNK
            blocks = ", with a compressor whose block is no longer," if config.needed < config.world_size else ","
            raise FrameError(
                f"Results of {max(sizes)} bytes do not fit a datagram of {MAX_PACKET_BYTES} bytes. Pass "
                f"packet_elements={fitting} or less{blocks} or start the server without --udp."
            )

    def _check_session(self) -> None:
        """Raise what ends the session."""
        if self._error is not None:
            raise self._error
        session, now = self._session, time.monotonic()
        if session is not None and isinstance(session.machine, KernelStateMachine):
            session.machine.check(self.options.xdp)
        present = set() if session is None else session.present | session.finished
        lost = [worker for worker in range(self.options.workers) if worker not in present]
        self._check_refused(lost)
        for worker in lost:
            since = self._started if session is None else session.lost_at.get(worker, session.began)
            known = session is not None and (session.machine.resumed or worker in session.lost_at)
            patience = self.options.patience if known else self.options.start_timeout
            if now - since > patience.total_seconds():
                raise away(lost, patience, worker)
        if session is not None:
            self._check_results(session, now)

    def _check_results(self, session: _Session, now: float) -> None:
        waiting = session.machine.oldest_open()
        if waiting is None:
            return
        finished = session.finished.intersection(waiting.missing)
        if finished:
            raise finished_early(finished, f"packets of round {waiting.key.round}")
        if now - waiting.since > session.stall_seconds:
            what = f"round {waiting.key.round} of stream {waiting.key.stream}"
            raise stalled(waiting.missing, what, session.stall_seconds)

    # -- packets ---------------------------------------------------------------------------------------------

    def _read_datagrams(self) -> None:
        assert self._datagrams is not None, "started with datagrams alone"
        with selectors.DefaultSelector() as selector:
            selector.register(self._datagrams.socket, selectors.EVENT_READ)
            while not self._ended:
                if selector.select(_TURN_SECONDS):
                    self._take_datagrams(self._datagrams)

    def _take_datagrams(self, datagrams: DatagramSocket) -> None:
        for source, datagram in datagrams.receive(_DATAGRAMS_PER_READ):
            session = self._session
            worker = None if session is None else session.datagrams.get(source)
            packet = None if worker is None else self._open(worker.receiver, datagram)
            if worker is None:
                self._num_forged += 1
            if session is None or worker is None or packet is None:
                continue  # forged or a replay
            with contextlib.suppress(FrameError):  # counted
                worker.validated = True
                if worker.asks_too_often(packet, time.monotonic()):
                    session.machine.counters.refused += 1
                elif self._rng.random() < self.options.drop:
                    session.machine.counters.dropped += 1
                else:
                    self._send(session, session.machine.receive(packet, time.monotonic(), worker.worker))
        if (session := self._session) is not None:
            self._flush(session)

    def _flush(self, session: _Session) -> None:
        machine = session.machine
        hashes = session.hashes.flush(machine.epoch)
        workers = [known.worker for known in session.datagrams.values() if known.validated]
        machine.counters.sent += len(hashes) * len(workers)
        self._send(session, [PacketToSend(worker, packet) for worker in workers for packet in hashes])
        self._send(session, machine.flush())

    def _open(self, receiver: DatagramReceiver, datagram: memoryview) -> memoryview | None:
        forged, replayed = receiver.forged, receiver.replayed
        packet = receiver.open(datagram)
        self._num_forged += receiver.forged - forged
        self._num_replayed += receiver.replayed - replayed
        return packet

    def _send_over_tcp(self, messages: list[PacketToSend]) -> None:
        header = self._header(FrameKind.PACKET)
        for worker, packet in messages:
            self._endpoint.send(worker, header, packet)

    def _send(self, session: _Session, messages: list[PacketToSend]) -> None:
        for worker, packet in messages:
            if self._datagrams is None:
                receivers = list(session.present) if worker == EVERYONE else [worker]
                self._send_over_tcp([PacketToSend(each, packet) for each in receivers])
            elif worker == EVERYONE and session.group is not None and self.options.multicast is not None:
                self._datagrams.send(packet, self.options.multicast, session.group)
                session.hashes.add(packet)
            else:
                for known in session.datagrams.values():
                    if known.validated and worker in (EVERYONE, known.worker):
                        self._datagrams.send(packet, known.address, known.sender)
                    elif worker == known.worker:  # it may be waiting itself, and send nothing unless it is asked
                        self._send_over_tcp([PacketToSend(worker, packet)])


def _new_epoch() -> int:
    """Random number of an incarnation: the seconds of this machine's clock, and 31 random bits.

    A server that was restarted remembers no session. By the epochs of their last welcomes, it knows the latest one.
    """
    return int(time.time()) << 31 | secrets.randbits(31)


class _EarlierSessionError(FrameError):
    """A worker of a session that this server has dropped for a later one."""
