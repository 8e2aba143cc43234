"""The worker's end of aggregation, sans-IO: contributions go out until their results have come.

Guarantees: a packet that is sent again is the same bytes; a result is taken once; what was submitted ends with a result
or, after its deadline, with one error. Where packets can be lost they are sent again by an adaptive timer, and no more
of them are under way than a window that halves with losses; over a connection that loses nothing there is neither.

A server that comes back without a memory (another epoch) is sent everything that has not been answered, and, where it
asks, what has: the payloads of the round before are kept for that. Where a server may go on without stragglers, a
second life of it could count others than the first: then its end is the job's.

Source: THC (Li et al. 2024), section 6, for packets and stragglers. Differences: what is lost is sent again.
"""
# Shapes: W = workers, P = elements of a stream, Q = its packets

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from gradwire.aggregator.counters import PacketCounters
from gradwire.aggregator.packet import MAX_ROUND, SERVER, Packet, PacketKey, PacketKind, keys_of, pack, unpack
from gradwire.aggregator.request import AggregationRequest
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.window import Window
from gradwire.core.errors import FrameError, PeerTimeoutError, SyncError
from gradwire.wire.frame import FrameFlags

NO_EPOCH = 0


class WorkerStateMachine:
    """One worker's end.

    Args:
        terms: what was agreed.
        worker: its number.
        window: of packets that are under way; None for a connection that loses nothing.

    Attributes:
        window: the same; to be changed before the first `joined` at the latest.
        epoch: of the server's life; `NO_EPOCH` before the first.
        counters: what has happened so far.
    """

    def __init__(self, terms: SessionConfig, worker: int, window: Window | None = None) -> None:
        self.terms = terms
        self.worker = worker
        self.epoch = NO_EPOCH
        self.counters = PacketCounters()
        self.window = window
        self._open: dict[int, AggregationRequest] = {}
        self._last: dict[int, AggregationRequest] = {}
        self._fresh: deque[tuple[AggregationRequest, int]] = deque()

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags, deadline: float
    ) -> AggregationRequest:
        """See `Aggregation.submit`; `deadline` is on the caller's clock, and no earlier than that of the last call.

        Raises:
            ValueError: see there.
        """
        if not 0 <= stream < len(self.terms.streams):
            raise ValueError(f"Expected a stream below {len(self.terms.streams)}, got {stream}.")
        last = self._last.get(stream)
        if stream in self._open or not (-1 if last is None else last.round) < round_ <= MAX_ROUND:
            raise ValueError(
                f"Expected rounds of stream {stream} one after another, got {round_} before the last was done, or "
                "after a later one. Do: wait for its future, and count rounds up."
            )
        made = AggregationRequest(self.terms, round_, stream, payload, out, flags, deadline)
        self._open[stream] = made
        self._fresh.append((made, 0))
        return made

    # -- sending ---------------------------------------------------------------------------------------------

    def joined(self, epoch: int, now: float) -> Iterator[np.ndarray]:
        """The server has said which life it is in; yield what goes to it at once.

        Raises:
            SyncError: it is another than before, and may have counted others.
        """
        came_back, self.epoch = self.epoch not in (NO_EPOCH, epoch), epoch
        if came_back and self.terms.needed < self.terms.world_size and (self._open or self._last):
            raise SyncError(
                "Expected the aggregation server to stay while it may answer without stragglers, got a new one: it "
                "could count others than its predecessor has. Do: start the job anew from a checkpoint."
            )
        unanswered = [key for submission in self._open.values() for key in submission.unanswered()]
        for key in unanswered:
            if self.window is None:
                yield self._send_again(key, now)
            elif came_back:
                self.window.lose(key)

    def poll(self, now: float) -> Iterator[np.ndarray]:
        """Yield what goes out now.

        Raises:
            PeerTimeoutError: something is past its deadline.
        """
        self._check_deadlines(now)
        if self.window is not None:
            due = self.window.due(now)
            for key in due.again:
                yield self._send_again(key, now)
            for key in due.ask:
                self.counters.sent += 1
                yield pack(PacketKind.ASK, key, self.worker, self.epoch)
        while self._fresh and self.epoch != NO_EPOCH and (self.window is None or self.window.room):
            submission, place = self._fresh.popleft()
            if place + 1 < submission.num_packets:
                self._fresh.appendleft((submission, place + 1))
            submission.begun = place + 1
            if submission.lacks(place):
                key = PacketKey(submission.round, submission.stream, place)
                if self.window is not None:
                    self.window.send(key, now)
                self.counters.sent += 1
                yield self._packet(submission, key)

    def deadline(self) -> float | None:
        """When to poll next, unless something happens before."""
        if self._fresh and self.epoch != NO_EPOCH and (self.window is None or self.window.room):
            return 0.0
        oldest = next(iter(self._open.values()), None)
        timer = None if self.window is None else self.window.deadline()
        if oldest is None or timer is None:
            return timer if oldest is None else oldest.deadline
        return min(timer, oldest.deadline)

    def _send_again(self, key: PacketKey, now: float) -> np.ndarray:
        if self.window is not None:
            self.window.send_again(key, now)
        self.counters.sent += 1
        self.counters.sent_again += 1
        return self._packet(self._open[key.stream], key)

    def _packet(self, submission: AggregationRequest, key: PacketKey) -> np.ndarray:
        piece = submission.piece(key.packet)
        return pack(PacketKind.DATA, key, self.worker, self.epoch, piece, flags=int(submission.flags))

    def _check_deadlines(self, now: float) -> None:
        oldest = next(iter(self._open.values()), None)
        if oldest is not None and now >= oldest.deadline:
            raise PeerTimeoutError(
                f"Expected the result of stream {oldest.stream}, round {oldest.round}, in time, got "
                f"{oldest.num_packets - oldest.left} of {oldest.num_packets} packets (at worker {self.worker}). Do: "
                "look at the server's log, which names the workers that it waits for.",
                phase=f"round {oldest.round}",
            )

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(
        self, datagram: bytes | memoryview | np.ndarray, now: float
    ) -> tuple[list[AggregationRequest], list[np.ndarray]]:
        """Take what has come, and return what is done now, and what goes out at once.

        Args:
            datagram: may be used again after the call.
            now: seconds on the caller's monotonic clock.

        Raises:
            FrameError: it is not a packet, or not one that the server may send. Nothing has changed.
            SyncError: the server has gone on without this worker.
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
        if packet.worker != SERVER or packet.kind not in _FROM_SERVER or not self._fits(packet):
            self.counters.refused += 1
            raise FrameError(f"Expected a word of the server, got {packet.kind.name} of {packet.key}.")
        if packet.kind is PacketKind.RESULT:
            return self._take(packet, now), []
        if packet.kind is PacketKind.HELD:
            self._hold(keys_of(packet.body), now)
            return [], []
        if packet.kind is PacketKind.WANTED:
            return [], self._give(packet.key, now)
        self._check_obsolete(packet.key)
        return [], []

    def _take(self, packet: Packet, now: float) -> list[AggregationRequest]:
        submission = self._waiting_for(packet.key)
        if submission is None:
            self.counters.duplicates += 1
            return []
        self.counters.taken += 1
        if self.window is not None:
            self.window.finish(packet.key, now)
        submission.take(packet)
        if submission.left:
            return []
        del self._open[submission.stream]
        self._last[submission.stream] = submission
        return [submission]

    def _hold(self, keys: list[PacketKey], now: float) -> None:
        if self.window is None:
            return
        for key in keys:
            if self._waiting_for(key) is not None:
                self.window.hold(key, now)

    def _give(self, key: PacketKey, now: float) -> list[np.ndarray]:
        """The server lacks something that may have been sent to it, or to its predecessor."""
        submission = self._waiting_for(key)
        if submission is not None:
            if key.packet >= submission.begun or not (self.window is None or self.window.recall(key)):
                return []  # it goes out anyway
            return [self._send_again(key, now)]
        for submission in (self._open.get(key.stream), self._last.get(key.stream)):
            if submission is not None and submission.round == key.round and key.packet < submission.num_packets:
                self.counters.sent += 1
                self.counters.sent_again += 1
                return [self._packet(submission, key)]
        return []

    def _check_obsolete(self, key: PacketKey) -> None:
        if self._waiting_for(key) is not None:
            raise SyncError(
                f"Expected the result of stream {key.stream}, round {key.round}, got word that the server has gone on "
                f"without worker {self.worker} for too long. Do: start this worker anew from a checkpoint.",
                rank=self.worker,
            )

    def _waiting_for(self, key: PacketKey) -> AggregationRequest | None:
        submission = self._open.get(key.stream)
        if submission is None or submission.round != key.round or not submission.lacks(key.packet):
            return None
        return submission

    def _fits(self, packet: Packet) -> bool:
        if packet.kind is not PacketKind.RESULT:
            return (
                packet.num_added == 0
                and packet.flags == 0
                and (packet.kind is PacketKind.HELD or not packet.body.nbytes)
            )
        _, stream, place = packet.key
        if stream >= len(self.terms.streams) or place >= self.terms.num_packets(stream):
            return False
        return packet.body.nbytes == self.terms.result_bytes(stream, place)


_FROM_SERVER = frozenset({PacketKind.RESULT, PacketKind.HELD, PacketKind.WANTED, PacketKind.OBSOLETE})
