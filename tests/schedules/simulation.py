"""Aggregation rounds of many workers in virtual time: the real state machines over a `DatagramNetwork`.

Nothing of the protocol is modeled: `AggregatorStateMachine` and `WorkerStateMachine` exchange packed bytes. Every
worker takes part in all rounds, one after another, with all streams of a round at once. A restart of the server loses
its state, and every worker learns the new epoch at once, as it does from a connection.
"""
# Shapes: W = workers, P = elements of a stream

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.aggregator.packet import SERVER, PacketCounters
from gradwire.aggregator.request import AggregationRequest, Reply
from gradwire.aggregator.retransmission import Window
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.worker import WorkerStateMachine
from gradwire.core.errors import FrameError, SyncError
from gradwire.wire.frame import FrameFlags
from tests.schedules.datagrams import DatagramNetwork, Faults

Payloads = Callable[[int, int, int], np.ndarray | None]
"""Payload of a worker, by worker, round and stream."""


@dataclass(frozen=True, eq=False)
class Result:
    """Result of one worker for one stream of one round."""

    values: np.ndarray
    reply: Reply


class _Worker:
    """A worker and its progress."""

    def __init__(self, config: SessionConfig, worker: int, window: int, seed: int) -> None:
        self.end = WorkerStateMachine(config, worker, Window(window, random.Random(seed)))
        self.round = 0
        self.waits_for = 0
        self.starts_at = 0.0
        self.due: float | None = None  # when it next does something by itself; None if that has to be asked
        self.outs: dict[int, np.ndarray] = {}


class AggregationSimulation:
    """One run.

    Args:
        config: Session config of the job.
        payloads: Contributions of the workers.
        rounds: Numbers of the rounds, ascending.
        faults: Faults of the network.
        seed: Seed of everything random.
        window: Packets in flight per worker.
        pace: Seconds that a worker computes before a round, by worker and index of the round.
        timeout: Seconds of virtual time per submission.
        server: Makes an incarnation of the server from configuration and epoch.
        sealed: Returns how a worker's packet travels to a server, from server, worker and packet.

    Attributes:
        results: Results by (worker, round, stream).
        aggregator: Current incarnation of the server.
        network: The network.
    """

    def __init__(
        self, config: SessionConfig, payloads: Payloads, rounds: Sequence[int], faults: Faults, seed: int, *,
        window: int = 64,
        pace: Callable[[int, int], float] = lambda worker, place: 0.0, timeout: float = math.inf,
        server: Callable[[SessionConfig, int], AggregatorStateMachine] = AggregatorStateMachine,
        sealed: Callable[[Any, int, np.ndarray], bytes] = lambda server, worker, packet: packet.tobytes(),
    ) -> None:  # fmt: skip
        self.config = config
        self.results: dict[tuple[int, int, int], Result] = {}
        self.network = DatagramNetwork(faults, seed)
        self._server, self._sealed = server, sealed
        self.aggregator = server(config, 1)
        self._earlier: list[PacketCounters] = []  # of servers that were killed
        self._payloads, self._rounds, self._pace, self._timeout = payloads, rounds, pace, timeout
        self._workers = [_Worker(config, worker, window, seed + worker) for worker in range(config.world_size)]
        for worker in self._workers:
            self._join(worker)

    @property
    def worker_counters(self) -> list[PacketCounters]:
        """Packet counters of each worker."""
        return [worker.end.counters for worker in self._workers]

    @property
    def server_counters(self) -> list[PacketCounters]:
        """Packet counters of each incarnation of the server."""
        return [*self._earlier, self.aggregator.counters]

    def run(self, until: float = math.inf) -> bool:
        """Run until all workers have all results, or until a time. Returns whether all have.

        Raises:
            SyncError: A worker gave up, or nothing is left to happen.
        """
        while not all(worker.round == len(self._rounds) for worker in self._workers):
            due = min(self._due(worker) for worker in self._workers)
            arrival = self.network.next_arrival()
            time = min(due, math.inf if arrival is None else arrival)
            if time > until:
                self.network.now = until
                return False
            if time == math.inf:
                raise SyncError("No packet is in flight and no deadline is set: the protocol is stuck.")
            if arrival is not None and arrival <= due:
                self._deliver()
            else:
                self.network.now = max(self.network.now, due)
                for worker in self._workers:
                    if self._due(worker) <= self.network.now:
                        self._go_on(worker)
        return True

    def restart(self) -> None:
        """Kill the server and start a new incarnation."""
        self._earlier.append(self.aggregator.counters)
        self.aggregator = self._server(self.config, self.aggregator.epoch + 1)
        self.aggregator.resumed = True
        for worker in self._workers:
            self._join(worker)

    def _join(self, worker: _Worker) -> None:
        worker.due = None
        self._send_to_server(worker, worker.end.joined(self.aggregator.epoch, self.network.now))

    def _due(self, worker: _Worker) -> float:
        if worker.due is None:
            worker.due = self._asked_due(worker)
        return worker.due

    def _asked_due(self, worker: _Worker) -> float:
        if worker.round == len(self._rounds):
            return math.inf
        if not worker.waits_for:
            return worker.starts_at
        deadline = worker.end.deadline()
        return math.inf if deadline is None else deadline

    def _go_on(self, worker: _Worker) -> None:
        now, worker.due = self.network.now, None
        if not worker.waits_for:
            self._next_round(worker)
        self._finish(worker, worker.end.fill(now))
        self._send_to_server(worker, worker.end.poll(now))

    def _next_round(self, worker: _Worker) -> None:
        round_, end = self._rounds[worker.round], worker.end
        for stream, found in enumerate(self.config.streams):
            out = worker.outs[stream] = np.empty(found.size, self.config.result_dtype(stream))
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
        worker.due = None
        with contextlib.suppress(FrameError):
            done, datagrams = worker.end.receive(arrival.data, self.network.now)
            self._send_to_server(worker, datagrams)
            self._finish(worker, done)

    def _finish(self, worker: _Worker, done: Sequence[AggregationRequest]) -> None:
        for submission in done:
            key = worker.end.worker, submission.round, submission.stream
            self.results[key] = Result(worker.outs[submission.stream], submission.reply())
            worker.waits_for -= 1
        if done and not worker.waits_for:
            worker.round += 1
            worker.starts_at = self.network.now + self._pace(worker.end.worker, worker.round)

    def _send_to_server(self, worker: _Worker, packets: Sequence[np.ndarray]) -> None:
        for packet in packets:
            self.network.send(SERVER, self._sealed(self.aggregator, worker.end.worker, packet))

    def _send(self, messages: list[PacketToSend]) -> None:
        for message in messages:
            everyone = range(self.config.world_size) if message.worker == EVERYONE else [message.worker]
            for worker in everyone:
                self.network.send(worker, bytes(message.packet))
