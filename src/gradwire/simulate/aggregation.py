"""Aggregation rounds of many workers in virtual time: the product's own state machines over a `DatagramNetwork`.

Guarantees: nothing of the protocol is modeled. What runs are `AggregatorStateMachine` and `WorkerStateMachine`, with
packed bytes between them. Every worker takes part in all rounds, one after another, all streams of a round together. A
restart of the server loses all that it had, and tells every worker its new epoch at once, as a connection does.
"""
# Shapes: W = workers, P = elements of a stream

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.aggregator.packet import SERVER, PacketCounters
from gradwire.aggregator.request import Reply
from gradwire.aggregator.retransmission import Window
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.worker import WorkerStateMachine
from gradwire.core.errors import FrameError, SyncError
from gradwire.simulate.datagrams import DatagramNetwork, Faults
from gradwire.wire.frame import FrameFlags

Payloads = Callable[[int, int, int], np.ndarray | None]
"""What a worker contributes: from its number, the round and the stream."""


@dataclass(frozen=True, eq=False)
class Result:
    """What one worker has got of one stream in one round."""

    lanes: np.ndarray
    reply: Reply


class _Worker:
    """A worker and where it stands."""

    def __init__(self, terms: SessionConfig, worker: int, window: int, seed: int) -> None:
        self.end = WorkerStateMachine(terms, worker, Window(window, random.Random(seed)))
        self.round = 0
        self.waits_for = 0
        self.starts_at = 0.0
        self.outs: dict[int, np.ndarray] = {}


class AggregationSimulation:
    """One run.

    Args:
        terms: of the job.
        payloads: what is contributed.
        rounds: their numbers, going up.
        faults: of the network.
        seed: of all that is random.
        window: packets under way for each worker.
        pace: seconds that a worker computes before a round, from its number and the round's place.
        timeout: seconds of virtual time for each submission.

    Attributes:
        results: what each worker got, by (worker, round, stream).
        aggregator: the server in its present life.
        network: the network.
        server_counters: of all lives of the server.
    """

    def __init__(
        self, terms: SessionConfig, payloads: Payloads, rounds: Sequence[int], faults: Faults, seed: int, *,
        window: int = 64,
        pace: Callable[[int, int], float] = lambda worker, place: 0.0, timeout: float = math.inf,
    ) -> None:  # fmt: skip
        self.terms = terms
        self.results: dict[tuple[int, int, int], Result] = {}
        self.network = DatagramNetwork(faults, seed)
        self.aggregator = AggregatorStateMachine(terms, epoch=1)
        self.server_counters = [self.aggregator.counters]
        self._payloads, self._rounds, self._pace, self._timeout = payloads, rounds, pace, timeout
        self._workers = [_Worker(terms, worker, window, seed + worker) for worker in range(terms.world_size)]
        for worker in self._workers:
            self._join(worker)

    @property
    def worker_counters(self) -> list[PacketCounters]:
        """Of each worker."""
        return [worker.end.counters for worker in self._workers]

    def run(self, until: float = math.inf) -> bool:
        """Go on until all workers have all results, or to a time; whether all have.

        Raises:
            SyncError: a worker has given up.
        """
        while not all(worker.round == len(self._rounds) for worker in self._workers):
            due = min(self._due(worker) for worker in self._workers)
            arrival = self.network.next_arrival()
            time = min(due, math.inf if arrival is None else arrival)
            if time > until:
                self.network.now = until
                return False
            if time == math.inf:
                raise SyncError("Expected something to happen, got a network at rest: the protocol is stuck.")
            if arrival is not None and arrival <= due:
                self._deliver()
            else:
                self.network.now = max(self.network.now, due)
                for worker in self._workers:
                    if self._due(worker) <= self.network.now:
                        self._go_on(worker)
        return True

    def restart(self) -> None:
        """Kill the server, and start another in its place."""
        self.aggregator = AggregatorStateMachine(self.terms, self.aggregator.epoch + 1)
        self.aggregator.resumed = True
        self.server_counters.append(self.aggregator.counters)
        for worker in self._workers:
            self._join(worker)

    def _join(self, worker: _Worker) -> None:
        for datagram in worker.end.joined(self.aggregator.epoch, self.network.now):
            self.network.send(SERVER, bytes(datagram))

    def _due(self, worker: _Worker) -> float:
        if worker.round == len(self._rounds):
            return math.inf
        if not worker.waits_for:
            return worker.starts_at
        deadline = worker.end.deadline()
        return math.inf if deadline is None else deadline

    def _go_on(self, worker: _Worker) -> None:
        now = self.network.now
        if not worker.waits_for:
            self._next_round(worker)
        for datagram in worker.end.poll(now):
            self.network.send(SERVER, bytes(datagram))

    def _next_round(self, worker: _Worker) -> None:
        round_, end = self._rounds[worker.round], worker.end
        for stream, found in enumerate(self.terms.streams):
            out = worker.outs[stream] = np.empty(found.size, self.terms.result_dtype(stream))
            payload = self._payloads(end.worker, round_, stream)
            end.submit(round_, stream, payload, out, FrameFlags.NONE, self.network.now + self._timeout)
            worker.waits_for += 1

    def _deliver(self) -> None:
        arrival = self.network.receive()
        if arrival.receiver == SERVER:
            with contextlib.suppress(FrameError):
                self._send(self.aggregator.receive(arrival.data, self.network.now))
            self._send(self.aggregator.flush())
            return
        worker = self._workers[arrival.receiver]
        with contextlib.suppress(FrameError):
            done, datagrams = worker.end.receive(arrival.data, self.network.now)
            for datagram in datagrams:
                self.network.send(SERVER, bytes(datagram))
            for submission in done:
                key = worker.end.worker, submission.round, submission.stream
                self.results[key] = Result(worker.outs[submission.stream], submission.reply())
                worker.waits_for -= 1
            if done and not worker.waits_for:
                worker.round += 1
                worker.starts_at = self.network.now + self._pace(worker.end.worker, worker.round)

    def _send(self, messages: list[PacketToSend]) -> None:
        for message in messages:
            everyone = range(self.terms.world_size) if message.worker == EVERYONE else [message.worker]
            for worker in everyone:
                self.network.send(worker, bytes(message.packet))
