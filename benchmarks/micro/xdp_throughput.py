"""Contributions a second that THC's aggregator adds up, over real interfaces: in the kernel, and in Python.

Host 0 of the lab serves. Four workers on host 1, in one process, send prepared packets of 1,024 indices, round after
round, as fast as the results of the round before allow, and receive all results. So a figure holds everything on the
way: system calls of the workers, both interfaces, checks, sums, and a copy of each result for each worker. One of 256
results a round and worker is checked and compared with the sum of its contributions.

The workers keep one core busy. In the kernel, the program runs on their core, since cables (veth) hand packets over in
the sender's system call; Python's server has the other core for itself.
"""
# Shapes: W = workers, P = packets of a round

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer

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
TABLE = IndexTable(4, tuple(range(16)), 8)
CONFIG = SessionConfig(WORKERS, (TABLE,), (Stream(Operation.SUM, PACKETS * ELEMENTS),), ELEMENTS, mtu=1500)
CASES = {
    "python": ("--udp",),
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

    def prepared(self, round_: int, packet: int) -> bytes:
        """Return a contribution as it travels."""
        made = pack(PacketKind.DATA, PacketKey(round_, 0, packet), self.rank, self._worker.epoch, self.bodies[packet])
        return made.tobytes() + self.sender.trailer(made)

    def take(self, round_: int, missing: set[int], expected: np.ndarray) -> None:
        """Take the results that have arrived; the one for packet 0 is compared with the sum of its contributions."""
        while missing:
            try:
                datagram = self.datagrams.recv(MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if datagram[_KIND.offset] == PacketKind.RESULT and _number(datagram, _ROUND) == round_:
                packet = _number(datagram, _PACKET)
                missing.discard(packet)
                if packet == 0:
                    opened = self.receiver.open(memoryview(bytearray(datagram)))
                    if opened is None or bytes(opened[-ELEMENTS:]) != expected.tobytes():
                        raise RuntimeError(f"The result of round {round_} is wrong at rank {self.rank}.")


def turn(workers: list[PreparedWorker], round_: int, made: list[list[bytes]], expected: np.ndarray) -> int:
    """Send all packets of a round, and wait for all results. Returns how many contributions were sent again."""
    missing = [set(range(PACKETS)) for _ in workers]
    for packet in range(PACKETS):
        for worker, own in zip(workers, made):
            worker.datagrams.send(own[packet])
        if packet % 16 == 15:
            for worker, lacks in zip(workers, missing):
                worker.take(round_, lacks, expected)
    sent, repeated = time.monotonic(), 0
    while any(missing):
        for worker, lacks in zip(workers, missing):
            worker.take(round_, lacks, expected)
        if time.monotonic() - sent > REPEAT_SECONDS:
            sent = time.monotonic()
            lost = set().union(*missing)
            repeated += len(lost) * len(workers)
            for packet, worker in product(sorted(lost), workers):
                worker.datagrams.send(worker.prepared(round_, packet))
    return repeated


def work(address: str, seconds: float) -> dict[str, float]:
    """The workers: send for about some seconds, and return contributions a second and how many were sent again."""
    workers = [PreparedWorker(rank, address) for rank in range(WORKERS)]
    expected = np.zeros(ELEMENTS, np.uint8)
    for worker in workers:
        reference.lookup_indices(worker.bodies[0], 4, TABLE.array, expected, accumulate=True)
    took, count, repeated = 0.0, 0, 0
    for round_ in range(MAX_ROUNDS):
        made = [[worker.prepared(round_, packet) for packet in range(PACKETS)] for worker in workers]
        began = time.perf_counter()
        again = turn(workers, round_, made, expected)
        if round_:  # the first one warms up
            took, count, repeated = took + time.perf_counter() - began, count + 1, repeated + again
        if took > seconds:
            break
    for worker in workers:
        worker.close()
    return {"rate": count * PACKETS * WORKERS / took, "repeated": repeated, "rounds": count}


def measure(case: str, seconds: float) -> dict[str, float]:
    """One case, in a lab of its own."""
    key = {"GRADWIRE_JOB_KEY": secrets.token_hex(32)}
    with Lab(2) as lab:
        lab.receive_by_napi(0)
        serve = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", str(WORKERS)]
        serve += ["--host", lab.addresses[0], "--port", str(PORT), *CASES[case]]
        server = lab.popen(serve, 0, env=key, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("Serving"):
            raise RuntimeError(line + server.communicate(timeout=60)[0])
        command = [sys.executable, "-m", "benchmarks.micro.xdp_throughput", lab.addresses[0], str(seconds)]
        workers = lab.popen(command, 1, env=key, stdout=subprocess.PIPE, text=True)
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
    for turn, case in product(range(turns), only or CASES):
        found = measure(case, seconds)
        where = {
            "method": "thc", "case": case, "packet_elements": ELEMENTS, "ranks": WORKERS, "rate": "none",
            "source": "measured", "run": turn,
        }  # fmt: skip
        yield {**where, "metric": "contributions_per_second", "value": found["rate"], "unit": "1/s"}
        yield {**where, "metric": "sent_again", "value": found["repeated"] / found["rounds"], "unit": "1/round"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case: the median and the extremes of its turns, and against Python's in the same run."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["metric"] == "contributions_per_second":
            rates.setdefault(row["case"], []).append(row["value"])
    python = float(np.median(rates.get("python", [np.nan])))
    return "\n".join(
        f"{case:16} {np.median(found):8,.0f} contributions/s ({min(found):,.0f} to {max(found):,.0f}), "
        f"{np.median(found) / python:5.1f} times Python's"
        for case, found in rates.items()
    )


def _number(datagram: bytes, place: HeaderField) -> int:
    return int.from_bytes(datagram[place.offset : place.offset + place.num_bytes], "little")


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], float(sys.argv[2]))))
