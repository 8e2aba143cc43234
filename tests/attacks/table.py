"""A running job, one attack after another on it, and the table of what comes of them.

The job is an aggregation server and three workers on threads of this process. They form sums all the time, and each is
compared with a model. Who has no key attacks from another process.
"""

from __future__ import annotations

import statistics
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

_FEWEST_STEPS = 30
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

    def step(self) -> float:
        """Form the sums of a round and compare them. Returns the seconds that it took."""
        began = time.perf_counter()
        check_round(self.job.clients, self._round)
        self._round += 1
        return time.perf_counter() - began

    def beside(self, attack: Callable[..., Flood], *args: Any) -> tuple[Flood, str]:
        """Form sums while somebody without the key attacks the server."""
        before = [self.step() for _ in range(_FEWEST_STEPS)]
        attacking: Future[Flood] = self._others.submit(attack, self.address, *args)
        during = []
        while not attacking.done() or len(during) < _FEWEST_STEPS:
            during.append(self.step())
        ratio = statistics.median(during) / statistics.median(before)
        return attacking.result(), f"sums right; a step takes {ratio:.2f} times as long"

    def between(self, attack: Callable[..., Flood], *args: Any) -> tuple[Flood, str]:
        """Attack between two rounds."""
        flood = attack(self.job, *args)
        for _ in range(_FEWEST_STEPS):
            self.step()
        return flood, "sums right"

    def enter(self, attack: Callable[[Job], tuple[Flood, str]], expected: str) -> tuple[Flood, str]:
        """Have somebody join with the key, who must be told what is `expected`."""
        flood, told = attack(self.job)
        assert expected in told and "but that got" not in told, told
        for _ in range(_FEWEST_STEPS):
            self.step()
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
            yield Attack(name, *job.beside(outsiders.connections, kind, size.connections))
        yield Attack("a worker's recorded session", *job.beside(outsiders.replay, job.session, size.sessions))
        for name, attack in _DATAGRAMS.items():
            yield Attack(name, *job.beside(attack, job.recorded, size.datagrams), "datagrams")
        again = job.between(insiders.replay_from_the_worker, job.recorded, size.datagrams)
        yield Attack("recorded datagrams, from the worker's own address", *again, "datagrams")
        for name, (unit, *how, rate) in _FLOODS.items():
            yield Attack(name, *job.beside(outsiders.flood, *how, rate, size.seconds), unit)
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
