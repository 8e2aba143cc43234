"""The worker's side of aggregation without I/O: contributions are sent until their results have arrived.

Guarantees: a retransmitted packet has the same bytes. A result is taken once. Every request ends with its result or,
after its deadline, with an error. If packets can be lost, an adaptive timer retransmits them, and a window that halves
on loss limits the packets in flight. A lossless connection needs neither.

A restarted server (another epoch) has no memory. It is sent everything that has not been answered and, if it asks, what
has been: payloads of the previous round are kept for that. If a server may answer without stragglers, its successor
might count other workers, so a restart ends the job.

If the session fills (`SessionConfig.fill_seconds`), a packet of a sum whose result does not come in time is replaced by
zeros, at this worker alone. Its contribution has been sent, and counts as given, whether or not others have the sum.

Source: THC (Li et al. 2024), section 6, for packets, stragglers and zeros after a timeout. Differences: lost packets
are retransmitted, also until they are filled; maxima are never filled, because all workers decode by them.
"""
# Shapes: W = workers, P = elements of a stream, Q = its packets

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradwire.aggregator.multicast import UnprovenResults, hashes_of
from gradwire.aggregator.packet import (
    MAX_ROUND,
    SERVER,
    Packet,
    PacketCounters,
    PacketKey,
    PacketKind,
    keys_of,
    pack,
    unpack,
)
from gradwire.aggregator.request import AggregationRequest
from gradwire.aggregator.retransmission import Window
from gradwire.aggregator.session import NO_EPOCH, SessionConfig
from gradwire.core.errors import FrameError, PeerTimeoutError, SyncError
from gradwire.wire.frame import FrameFlags

_FROM_SERVER = frozenset(
    {PacketKind.RESULT, PacketKind.HELD, PacketKind.WANTED, PacketKind.OBSOLETE, PacketKind.DIGEST}
)


class _Fill(NamedTuple):
    """When a packet is filled with zeros, unless its result has come."""

    at: float
    request: AggregationRequest
    packet: int

    @property
    def is_moot(self) -> bool:
        """Whether the result has come."""
        return not self.request.lacks(self.packet)


class WorkerStateMachine:
    """A worker's side of one session.

    Args:
        config: Session configuration.
        worker: Rank of this worker.
        window: Window of packets in flight; None for a lossless connection. May be replaced until the first `joined`.
        server_name: What errors call the server.

    Attributes:
        epoch: Incarnation of the server; `NO_EPOCH` before the first.
        counters: Packet counts so far.
    """

    def __init__(
        self, config: SessionConfig, worker: int, window: Window | None = None, server_name: str = "aggregation server"
    ) -> None:
        self.config = config
        self.worker = worker
        self.epoch = NO_EPOCH
        self.counters = PacketCounters()
        self.window = window
        self._server_name = server_name
        self._open: dict[int, AggregationRequest] = {}
        self._last: dict[int, AggregationRequest] = {}
        self._unsent: deque[tuple[AggregationRequest, int]] = deque()
        self._unproven = UnprovenResults()
        self._to_fill: deque[_Fill] = deque()  # in the order in which they are due

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags, deadline: float
    ) -> AggregationRequest:
        """Submit a contribution; see `AggregationClient.submit`.

        `deadline` is on the caller's clock, and no earlier than that of the previous call.
        """
        if not 0 <= stream < len(self.config.streams):
            raise ValueError(f"Stream {stream} does not exist. There are {len(self.config.streams)} streams.")
        last = self._last.get(stream)
        if stream in self._open or not (-1 if last is None else last.round) < round_ <= MAX_ROUND:
            raise ValueError(
                f"Round {round_} of stream {stream} was submitted before the previous round was done, or after a later "
                "round. Wait for the future of the previous round, and count rounds up."
            )
        request = self._open[stream] = AggregationRequest(self.config, round_, stream, payload, out, flags, deadline)
        self._unsent.append((request, 0))
        return request

    # -- sending ---------------------------------------------------------------------------------------------

    def joined(self, epoch: int, now: float) -> Iterator[np.ndarray]:
        """Process the server's welcome, and yield the packets to send at once.

        Raises:
            SyncError: The server is not the one of before, and may have counted other workers.
        """
        restarted, self.epoch = self.epoch not in (NO_EPOCH, epoch), epoch
        if restarted and self.config.needed < self.config.world_size and (self._open or self._last):
            raise SyncError(
                f"The {self._server_name} was restarted. With a fraction below 1 the new server could count others "
                "than its predecessor has. Restart the job from a checkpoint."
            )
        unanswered = [key for request in self._open.values() for key in request.unanswered()]
        for key in unanswered:
            if self.window is None:
                yield self._send_again(key, now)
            elif restarted:
                self.window.lose(key)

    def poll(self, now: float) -> Iterator[np.ndarray]:
        """Yield the packets to send now.

        Raises:
            PeerTimeoutError: A request is past its deadline.
        """
        self._check_deadlines(now)
        if self.window is not None:
            due = self.window.due(now)
            for key in due.again:
                yield self._send_again(key, now)
            for key in due.ask:
                self.counters.sent += 1
                yield pack(PacketKind.ASK, key, self.worker, self.epoch)
        while self._can_send_next():
            request, packet = self._unsent.popleft()
            if packet + 1 < request.num_packets:
                self._unsent.appendleft((request, packet + 1))
            request.num_sent = packet + 1
            if request.lacks(packet):
                key = PacketKey(request.round, request.stream, packet)
                if self.window is not None:
                    self.window.send(key, now)
                if self.config.fills(request.stream):
                    self._to_fill.append(_Fill(now + self.config.fill_seconds, request, packet))
                self.counters.sent += 1
                yield self._packet(request, key)

    def fill(self, now: float) -> list[AggregationRequest]:
        """Fill the results that have not come in time with zeros, and return the requests that this completes."""
        done = []
        while self._to_fill and (self._to_fill[0].is_moot or self._to_fill[0].at <= now):
            _, request, packet = self._to_fill.popleft()
            if request.lacks(packet):
                done += self._fill(request, packet, now)
        return done

    def _fill(self, request: AggregationRequest, packet: int, now: float) -> list[AggregationRequest]:
        key = PacketKey(request.round, request.stream, packet)
        self.counters.filled += 1
        self._unproven.forget(key)
        if self.window is not None:
            self.window.give_up(key, now)
        request.fill(packet)
        return self._completed(request)

    def deadline(self) -> float | None:
        """Return when to call `fill` and `poll` next, unless something happens before."""
        if self._can_send_next():
            return 0.0
        oldest = next(iter(self._open.values()), None)
        times = [
            None if oldest is None else oldest.deadline,
            None if self.window is None else self.window.deadline(),
            self._to_fill[0].at if self._to_fill else None,
        ]
        return min((time for time in times if time is not None), default=None)

    def _can_send_next(self) -> bool:
        return bool(self._unsent) and self.epoch != NO_EPOCH and (self.window is None or self.window.has_room)

    def _send_again(self, key: PacketKey, now: float) -> np.ndarray:
        if self.window is not None:
            self.window.send_again(key, now)
        self.counters.sent += 1
        self.counters.sent_again += 1
        return self._packet(self._open[key.stream], key)

    def _packet(self, request: AggregationRequest, key: PacketKey) -> np.ndarray:
        body = request.body(key.packet)
        return pack(PacketKind.DATA, key, self.worker, self.epoch, body, flags=int(request.flags))

    def _check_deadlines(self, now: float) -> None:
        oldest = next(iter(self._open.values()), None)
        if oldest is not None and now >= oldest.deadline:
            raise PeerTimeoutError(
                f"The result of stream {oldest.stream}, round {oldest.round} did not arrive in time: worker "
                f"{self.worker} has {oldest.num_packets - oldest.num_missing} of {oldest.num_packets} packets. The log "
                f"of the {self._server_name} names the workers that it waits for.",
                phase=f"round {oldest.round}",
            )

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(
        self, datagram: bytes | memoryview | np.ndarray, now: float, *, from_group: bool = False
    ) -> tuple[list[AggregationRequest], list[np.ndarray]]:
        """Process a received packet, and return the completed requests and the packets to send at once.

        Args:
            datagram: Untrusted bytes; the memory may be reused after the call.
            now: Seconds on the caller's monotonic clock.
            from_group: Whether it came to a multicast group, so that another worker may have written it.

        Raises:
            FrameError: It is not a packet, or not one that the server may send. Nothing has changed.
            SyncError: The server has gone on without this worker.
        """
        self.counters.received += 1
        try:
            packet = unpack(datagram)
        except FrameError:
            self.counters.corrupt += 1
            raise
        if packet.epoch != self.epoch:
            self.counters.stale += 1
            return [], []
        allowed = {PacketKind.RESULT} if from_group else _FROM_SERVER
        if packet.worker != SERVER or packet.kind not in allowed or not self._fits(packet):
            self.counters.refused += 1
            raise FrameError(f"{packet.kind.name} of {packet.key} is not a packet that the server may send.")
        if packet.kind is PacketKind.RESULT:
            return self._take(packet, now) if not from_group or self._is_proven(packet, datagram) else [], []
        if packet.kind is PacketKind.DIGEST:
            return self._take_hashes(packet, now), []
        if packet.kind is PacketKind.HELD:
            self._hold(keys_of(packet.body), now)
            return [], []
        if packet.kind is PacketKind.WANTED:
            return [], self._resend(packet.key, now)
        return self._miss(packet.key, now), []

    def _take(self, packet: Packet, now: float) -> list[AggregationRequest]:
        request = self._waiting_for(packet.key)
        if request is None:
            self.counters.duplicates += 1
            return []
        self.counters.taken += 1
        self._unproven.forget(packet.key)
        if self.window is not None:
            self.window.finish(packet.key, now)
        request.take(packet)
        return self._completed(request)

    def _completed(self, request: AggregationRequest) -> list[AggregationRequest]:
        """Return a request if all of its results are there."""
        if request.num_missing:
            return []
        del self._open[request.stream]
        self._last[request.stream] = request
        return [request]

    def _is_proven(self, packet: Packet, datagram: bytes | memoryview | np.ndarray) -> bool:
        waits = self._waiting_for(packet.key) is not None
        return not waits or self._unproven.add_result(packet.key, bytes(datagram))

    def _take_hashes(self, packet: Packet, now: float) -> list[AggregationRequest]:
        done = []
        for key, named in hashes_of(packet.body):
            result = self._unproven.add_hash(key, named) if self._waiting_for(key) is not None else None
            if result is not None:
                done += self._take(unpack(result), now)
        return done

    def _hold(self, keys: list[PacketKey], now: float) -> None:
        if self.window is None:
            return
        for key in keys:
            if self._waiting_for(key) is not None:
                self.window.hold(key, now)

    def _resend(self, key: PacketKey, now: float) -> list[np.ndarray]:
        """Send what the server lacks, although it or its predecessor may have been sent it."""
        request = self._waiting_for(key)
        if request is not None:
            if key.packet >= request.num_sent or not (self.window is None or self.window.recall(key)):
                return []  # about to be sent anyway
            return [self._send_again(key, now)]
        for request in (self._open.get(key.stream), self._last.get(key.stream)):
            if request is not None and request.round == key.round and key.packet < request.num_packets:
                self.counters.sent += 1
                self.counters.sent_again += 1
                return [self._packet(request, key)]
        return []

    def _miss(self, key: PacketKey, now: float) -> list[AggregationRequest]:
        """Go on without a result that the server no longer has."""
        request = self._waiting_for(key)
        if request is None:
            return []
        if self.config.fills(key.stream):
            return self._fill(request, key.packet, now)
        raise SyncError(
            f"The {self._server_name} has gone on without worker {self.worker} and no longer has the result of "
            f"stream {key.stream}, round {key.round}. Restart this worker from a checkpoint.",
            rank=self.worker,
        )

    def _waiting_for(self, key: PacketKey) -> AggregationRequest | None:
        request = self._open.get(key.stream)
        if request is None or request.round != key.round or not request.lacks(key.packet):
            return None
        return request

    def _fits(self, packet: Packet) -> bool:
        if packet.kind is not PacketKind.RESULT:
            return (
                packet.num_added == 0
                and packet.flags == 0
                and (packet.kind in (PacketKind.HELD, PacketKind.DIGEST) or not packet.body.nbytes)
            )
        _, stream, index = packet.key
        if stream >= len(self.config.streams) or index >= self.config.num_packets(stream):
            return False
        return packet.body.nbytes == self.config.result_bytes(stream, index)
