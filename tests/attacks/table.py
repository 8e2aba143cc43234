"""A running job, one attack after another on it, and the table of what comes of them.

The job is an aggregation server and three workers on threads of this process. They form sums all the time, and each is
compared with a model. Who has no key attacks from another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pytest

from gradwire.aggregator.client import AggregationClient
from tests.aggregator.aggregation_job import Job, aggregation_job, check_round
from tests.aggregator.test_process_untrusted import eavesdropping
from tests.attacks import insiders, outsiders
from tests.integration.flood import Flood
from tests.net.attacker import Attacker
from tests.schedules import jobs

_FEWEST_STEPS = 50
_RECORDED_ROUNDS = 5
HEADINGS = "| attack | sent | got | connections closed | cost to the job |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Size:
    """How much is sent.

    Attributes:
        connections: Connections of an attack.
        datagrams: Datagrams of an attack.
        sessions: Sessions that are replayed.
        seconds: Time of a flood.
    """

    connections: int = 1000
    datagrams: int = 2000
    sessions: int = 100
    seconds: float = 10.0


@dataclass(frozen=True)
class Attack:
    """One row.

    Attributes:
        name: What is done.
        flood: What was sent and got.
        cost: What it cost the job, in words.
        unit: What the counts are of.
    """

    name: str
    flood: Flood
    cost: str
    unit: str = "connections"

    def __str__(self) -> str:
        sent, got = self.flood.sent, self.flood.got_bytes
        closed = "" if self.unit == "datagrams" else "all" if self.flood.closed == sent else f"{self.flood.closed:,}"
        words = f"{sent:,} {self.unit if sent > 1 else self.unit[:-1]}, {self.flood.sent_bytes:,} bytes"
        return f"| {self.name} | {words} | {got:,} bytes | {closed} | {self.cost} |"


class JobUnderAttack:
    """Three workers that form sums, and somebody who has recorded their first rounds.

    Worker 0 is connected through an attacker that passes everything on.

    Attributes:
        address: Of the server.
        session: What worker 0 has sent on its connection.
        recorded: The datagrams of worker 0.
    """

    def __init__(self, job: Job, others: ProcessPoolExecutor, recorded: list[bytes], session: bytes) -> None:
        self.job, self.recorded, self.session = job, recorded, session
        self.address: tuple[str, int] = job.server.address
        self._others = others
        self._round = _RECORDED_ROUNDS

    def steps(self, until: Callable[[], bool] = lambda: True) -> float:
        """Form and compare sums, until then and a number of times. Returns the server's processor time for a step."""
        began, first = self._processor_s(), self._round
        while self._round < first + _FEWEST_STEPS or not until():
            check_round(self.job.clients, self._round)
            self._round += 1
        return (self._processor_s() - began) / (self._round - first)

    def during(self, attack: Callable[..., Flood], *args: Any) -> tuple[Flood, str]:
        """Form sums while somebody without the key attacks the server."""
        before, first = self.steps(), self._round
        attacking: Future[Flood] = self._others.submit(attack, self.address, *args)
        during = self.steps(attacking.done)
        flood = attacking.result()
        if not flood.closed:  # datagrams, which the sums use as well, and far more of the time
            return flood, "sums right"
        return flood, self._cost((during - before) * (self._round - first), flood)

    def between(self, attack: Callable[..., Flood], *args: Any) -> tuple[Flood, str]:
        """Attack between two rounds."""
        before = self._processor_s()
        flood = attack(self.job, *args)
        cost = self._cost(self._processor_s() - before, flood)
        self.steps()
        return flood, cost

    def _cost(self, seconds: float, flood: Flood) -> str:
        return f"sums right; {1e6 * seconds / flood.sent:.0f} µs of processor time for each"

    def _processor_s(self) -> float:
        """Processor time of the server's threads so far."""
        threads = self.job.server._endpoint._thread, self.job.server._reader
        return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads)

    def enter(self, attack: Callable[[Job], tuple[Flood, str]], expected: str) -> tuple[Flood, str]:
        """Have somebody join with the key, who must be told what is `expected`."""
        flood, told = attack(self.job)
        assert expected in told and "but that got" not in told, told
        self.steps()
        return flood, f"sums right; it is told “{expected}”"


@contextmanager
def job_under_attack() -> Iterator[JobUnderAttack]:
    """A job that ends well at the end of the `with` block."""
    with aggregation_job() as job, ExitStack() as stack:
        others = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        others.submit(outsiders.warm_up).result()
        config = jobs.config()
        address = job.serve(udp=True)
        on_the_way = Attacker(address, lambda sent, seen: sent)
        stack.callback(on_the_way.close)
        with pytest.MonkeyPatch.context() as patch, eavesdropping(patch) as datagrams:
            for rank, where in enumerate((on_the_way.address, address, address)):
                job.clients.append(AggregationClient(where, config, rank))
            for round_ in range(_RECORDED_ROUNDS):
                check_round(job.clients, round_)
            recorded = [each for each, to in datagrams if to == address]
        yield JobUnderAttack(job, others, recorded, bytes(on_the_way.sent))
        for client in job.clients:
            client.close()
        assert job.end() is None


def attacks(size: Size) -> Iterator[Attack]:
    """Make all attacks, one after another."""
    with job_under_attack() as job:
        for name, kind in _CONNECTIONS.items():
            yield Attack(name, *job.during(outsiders.connections, kind, size.connections))
        yield Attack("a worker's recorded session", *job.during(outsiders.replay, job.session, size.sessions))
        for name, attack in _DATAGRAMS.items():
            yield Attack(name, *job.during(attack, job.recorded, size.datagrams), "datagrams")
        again = job.between(insiders.replay_from_the_worker, job.recorded, size.datagrams)
        yield Attack("recorded datagrams, from the worker's own address", *again, "datagrams")
        for name, (unit, *how, rate) in _FLOODS.items():
            yield Attack(name, *job.during(outsiders.flood, *how, rate, size.seconds), unit)
        another = job.enter(insiders.join_with_another_model, "Run one model")
        yield Attack("join with the job key and another model", *another)
        elsewhere = job.enter(insiders.join_for_somebody_else, "wants datagrams at 127.0.0.2")
        yield Attack("join with the job key, and ask for results at another host", *elsewhere)
    for integrity in ("crc", "mac"):
        flood, cost = insiders.change_a_contribution(integrity)
        yield Attack(f"change a contribution on its way, with `{integrity}`", flood, cost, "frames")


_CONNECTIONS = {
    "connections that say nothing": "silent",
    "connections that send garbage": "garbage",
    "handshakes with another key": "forged",
}
_DATAGRAMS = {
    "recorded datagrams with made-up tags": outsiders.forged,
    "recorded datagrams, from another port": outsiders.datagrams,
}
_FLOODS = {
    "1,500 connections a second from 200 addresses": ("connections", "connect", outsiders.OTHERS, 1500),
    "1,500 connections a second from the workers' address": ("connections", "connect", outsiders.SHARED, 1500),
    "10,000 datagrams a second from 200 addresses": ("datagrams", "send", outsiders.OTHERS, 10_000),
}
