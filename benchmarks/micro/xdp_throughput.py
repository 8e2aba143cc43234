"""Contributions a second that THC's aggregator adds up, over real interfaces: in the kernel, and in Python.

Host 0 of the lab serves. Four workers on host 1, in one process, send prepared packets of 1,024 indices, round after
round, as fast as results allow, and receive all results. So a figure holds everything on the way: system calls of the
workers, 8 datagrams each, both interfaces, checks, sums, and a copy of each result for each worker. One of 256 results
a round and worker is checked and compared with the sum of its contributions.

Each host has a core of its own. What arrives at an interface is received by its host's core, also in the kernel, as if
a cable led to another machine. By default it is received on the sender's core, which is how `python` is measured, too:
it is faster that way.

Workers wait for results once 24 packets are on the way. A cable (veth) holds 256 frames, and loses more. With 64
packets on the way it did, and a lost frame costs the time until it is sent again.
"""
# Shapes: W = workers, P = packets of a round

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.micro.datagram_batches import DatagramBatch
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.packet import HeaderField, PacketKey, PacketKind, field, pack
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp.guard import GUARDS
from gradwire.aggregator.xdp.loader import MODES
from gradwire.kernels import reference
from gradwire.lab import Lab
from gradwire.net.client import ConnectionOptions
from gradwire.net.datagrams import DatagramReceiver, DatagramSender

WORKERS, PACKETS, ELEMENTS = 4, 256, 1024
PORT = 7071
MAX_ROUNDS = 400
REPEAT_SECONDS = 0.5
MAX_BYTES = 2048
AT_ONCE, WINDOW = 8, 24  # packets
TABLE = IndexTable(4, tuple(range(16)), 8)
CONFIG = SessionConfig(WORKERS, (TABLE,), (Stream(Operation.SUM, PACKETS * ELEMENTS),), ELEMENTS, mtu=1500)
CASES = {
    "python": ("--udp",),
    "python_own_core": ("--udp",),
    **{
        f"{mode}_{guard}": ("--xdp", "eth0", "--xdp-mode", mode, *(["--trust-network"] if guard == "crc32c" else []))
        for mode, guard in product(MODES, sorted(GUARDS))
    },
}
"""Options of `gradwire serve --aggregate`."""
_KIND, _ROUND, _PACKET = (field(name) for name in ("kind", "round", "packet"))


class PreparedWorker(AggregationClient):
    """A worker that joins as any other. Its packets are made before they are sent, and its results are only counted.

    Args:
        rank: Rank of this worker.
    """

    def __init__(self, rank: int, address: str) -> None:
        super().__init__((address, PORT), CONFIG, rank, connection=ConnectionOptions(timeout=timedelta(seconds=60)))
        assert self._welcome is not None and self._sender is not None, "joined"
        self.sender: DatagramSender = self._sender
        self.receiver: DatagramReceiver = self._receivers[0]
        self.datagrams = self._datagrams.socket
        self._selector.unregister(self.datagrams)  # its thread would take the results
        self._sources = []
        self.datagrams.connect((address, PORT))
        self.bodies = np.random.default_rng(rank).integers(0, 256, (PACKETS, ELEMENTS // 2), np.uint8)
        self.contributions = DatagramBatch(self.datagrams, PACKETS, len(self._contribution(0, 0)))
        self._arrived = DatagramBatch(self.datagrams, PACKETS, MAX_BYTES)

    def prepare(self, round_: int) -> None:
        """Make the contributions to a round, each with a number of its own."""
        for packet, row in enumerate(self.contributions.data):
            row[:] = np.frombuffer(self._contribution(round_, packet), np.uint8)

    def take(self, round_: int, missing: np.ndarray, expected: np.ndarray) -> None:
        """Take what has arrived; the result for packet 0 is compared with the sum of its contributions.

        `missing`, bool[P], are the packets whose results have not come.
        """
        count = self._arrived.receive()
        if not count:
            return
        rows = self._arrived.data[:count]
        of_round = _numbers(rows, _ROUND) == round_
        results = np.flatnonzero((rows[:, _KIND.offset] == PacketKind.RESULT) & of_round)
        packets = _numbers(rows, _PACKET)[results]
        missing[packets] = False
        for place in results[packets == 0]:
            opened = self.receiver.open(memoryview(self._arrived.received(place)))
            if opened is None or bytes(opened[-ELEMENTS:]) != expected.tobytes():
                raise RuntimeError(f"The result of round {round_} is wrong at rank {self.rank}.")

    def _contribution(self, round_: int, packet: int) -> bytes:
        """Return a contribution as it travels."""
        made = pack(PacketKind.DATA, PacketKey(round_, 0, packet), self.rank, self._worker.epoch, self.bodies[packet])
        return made.tobytes() + self.sender.trailer(made)


def turn(workers: list[PreparedWorker], round_: int, expected: np.ndarray) -> int:
    """Send all packets of a round, and wait for all results. Returns how many contributions were sent again."""
    missing, repeated = np.ones((len(workers), PACKETS), bool), 0
    for first in range(0, PACKETS, AT_ONCE):
        repeated += wait(workers, round_, expected, missing, max(0, first + AT_ONCE - WINDOW))
        for worker in workers:
            worker.contributions.send(first, AT_ONCE)
    return repeated + wait(workers, round_, expected, missing, PACKETS)


def wait(workers: list[PreparedWorker], round_: int, expected: np.ndarray, missing: np.ndarray, first: int) -> int:
    """Take results until none of the first packets is missing. Returns how many contributions were sent again.

    `missing` is bool[W, P].
    """
    sent, repeated = time.monotonic(), 0
    while missing[:, :first].any():
        for worker, lacks in zip(workers, missing):
            worker.take(round_, lacks, expected)
        if time.monotonic() - sent > REPEAT_SECONDS:
            sent = time.monotonic()
            lost = np.flatnonzero(missing[:, :first].any(axis=0))
            repeated += len(lost) * len(workers)
            for worker in workers:
                worker.prepare(round_)  # with new numbers
                for packet in lost:
                    worker.contributions.send(packet, 1)
    return repeated


def work(address: str, seconds: float) -> dict[str, float]:
    """The workers: send for about some seconds.

    Returns:
        Contributions a second in all rounds and in the fastest one, and how many a round were sent again.
    """
    workers = [PreparedWorker(rank, address) for rank in range(WORKERS)]
    expected = np.zeros(ELEMENTS, np.uint8)
    for worker in workers:
        reference.lookup_indices(worker.bodies[0], 4, TABLE.array, expected, accumulate=True)
    times, repeated = list[float](), 0
    for round_ in range(MAX_ROUNDS):
        for worker in workers:
            worker.prepare(round_)
        began = time.perf_counter()
        again = turn(workers, round_, expected)
        if round_:  # the first one warms up
            times.append(time.perf_counter() - began)
            repeated += again
        if sum(times) > seconds:
            break
    for worker in workers:
        worker.close()
    sent = PACKETS * WORKERS
    return {"rate": sent * len(times) / sum(times), "fastest": sent / min(times), "repeated": repeated / len(times)}


def receive_on(lab: Lab, host: int, core: int) -> None:
    """Let a core process what arrives at a host's interface (receive packet steering)."""
    mask, queue = f"{1 << core:x}", "/sys/class/net/eth0/queues/rx-0/rps_cpus"
    command = f"mount -t sysfs sysfs /sys && echo {mask} > {queue}"  # a namespace's own interfaces need its own /sys
    if lab.popen(["unshare", "--mount", "sh", "-c", command], host).wait(60):
        raise RuntimeError(f"The kernel does not let core {core} receive for host {host}.")


def measure(case: str, seconds: float) -> dict[str, float]:
    """One case, in a lab of its own."""
    key = {"GRADWIRE_JOB_KEY": secrets.token_hex(32)}
    workers_core, servers_core = sorted(os.sched_getaffinity(0))[:2]

    def start(command: list[str], host: int, core: int) -> subprocess.Popen[bytes]:
        def keep_to_core() -> None:
            os.sched_setaffinity(0, {core})

        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if host == 0 else {"stdout": subprocess.PIPE}
        return lab.popen(command, host, env=key, text=True, preexec_fn=keep_to_core, **output)

    with Lab(2) as lab:
        if case != "python":
            receive_on(lab, 0, servers_core)
        if not case.startswith("python"):
            lab.receive_by_napi(0)
        serve = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", str(WORKERS)]
        serve += ["--host", lab.addresses[0], "--port", str(PORT), *CASES[case]]
        server = start(serve, 0, servers_core)
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("Serving"):
            raise RuntimeError(line + server.communicate(timeout=60)[0])
        command = [sys.executable, "-m", "benchmarks.micro.xdp_throughput", lab.addresses[0], str(seconds)]
        workers = start(command, 1, workers_core)
        said = workers.communicate(timeout=60 + 10 * seconds)[0]
        if workers.returncode:
            server.terminate()
            raise RuntimeError(f"The workers of {case} failed. The server said: {server.communicate(timeout=60)[0]}")
        server.communicate(timeout=60)
    found: dict[str, float] = json.loads(said)
    return found


def run(
    seconds: Annotated[float, typer.Option(help="Seconds of a case and turn.")] = 3.0,
    turns: Annotated[int, typer.Option(help="Turns of all cases, one after another.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Cases to measure; all by default.")] = None,
) -> Iterator[dict[str, Any]]:
    """Contributions a second of all cases, in turns."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("Two cores are needed: one for the workers, one for the server.")
    for turn, case in product(range(turns), only or CASES):
        found = measure(case, seconds)
        where = {
            "method": "thc", "case": case, "packet_elements": ELEMENTS, "ranks": WORKERS, "rate": "none",
            "source": "measured", "run": turn,
        }  # fmt: skip
        yield {**where, "metric": "contributions_per_second", "value": found["rate"], "unit": "1/s"}
        yield {**where, "metric": "fastest_round", "value": found["fastest"], "unit": "1/s"}
        yield {**where, "metric": "sent_again", "value": found["repeated"], "unit": "1/round"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case: the median and the extremes of its turns, and against Python's in the same run."""
    rates: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        rates.setdefault(row["case"], {}).setdefault(row["metric"], []).append(row["value"])
    python = rates.get("python", {})
    return "\n".join(_line(case, found, python) for case, found in rates.items())


def _line(case: str, found: dict[str, list[float]], python: dict[str, list[float]]) -> str:
    rates, fastest = found["contributions_per_second"], max(found["fastest_round"])
    median, pythons = np.median(rates), np.median(python.get("contributions_per_second", np.nan))
    pythons_fastest = max(python.get("fastest_round", [np.nan]))
    return (
        f"{case:17} {median:8,.0f} contributions/s ({min(rates):,.0f} to {max(rates):,.0f}), "
        f"{median / pythons:5.1f} times Python's; fastest round {fastest:,.0f}, {fastest / pythons_fastest:5.1f} times"
    )


def _numbers(rows: np.ndarray, place: HeaderField) -> np.ndarray:
    """Return a field of the headers of datagrams, uint8[n, B]."""
    cut = np.ascontiguousarray(rows[:, place.offset : place.offset + place.num_bytes])
    found: np.ndarray = cut.view(f"<u{place.num_bytes}")[:, 0]
    return found


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], float(sys.argv[2]))))
