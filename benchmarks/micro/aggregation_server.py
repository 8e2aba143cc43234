"""Speed of an aggregation server on one core over loopback: bytes received per second, and their cost.

A server process runs on one core. Four workers in a process on another core send 4-bit indices of one tensor, round
after round, and receive sums of 8 bits. "rate" is the bytes received over the duration of all rounds, which the workers
may limit; "capacity" is the bytes received over the processor time of the server. A link of 1 Gb/s carries 125 MB/s.
Processor time per packet is that of the server, and that of a worker for a packet and its result.
"""
# Shapes: N = elements of the tensor, W = workers

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.compressors import make
from gradwire.compressors.thc import THC

WORKERS = 4
CASES = (
    ("tcp", 1 << 18), ("tcp", 61_440), ("tcp", 8192), ("udp", 61_440), ("udp", 8192), ("udp", 1024),
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One case: bytes per second of wall time and of processor time, and processor time per packet at both ends."""

    transport: str
    packet_elements: int
    rate: float
    capacity: float
    packet_seconds: float
    worker_packet_seconds: float
    size: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Lines of the CSV."""
        where = {"method": "thc", "dtype": "uint8", "size": self.size, "ranks": WORKERS, "rate": "none"}
        where |= {"source": "measured", "packet_elements": self.packet_elements}
        yield {**where, "metric": f"{self.transport}_in", "value": self.rate, "unit": "B/s"}
        yield {**where, "metric": f"{self.transport}_in_per_cpu_second", "value": self.capacity, "unit": "B/s"}
        yield {**where, "metric": f"{self.transport}_cpu_per_packet", "value": self.packet_seconds, "unit": "s"}
        spent = self.worker_packet_seconds
        yield {**where, "metric": f"{self.transport}_worker_cpu_per_packet", "value": spent, "unit": "s"}


def config(elements: int, packet_elements: int) -> SessionConfig:
    """The paper's table, and one tensor."""
    codec = make("thc", granularity=30)
    assert isinstance(codec, THC)
    coding = codec.lookup_table(WORKERS)
    table = IndexTable(coding.bits, tuple(coding.values.tolist()), 8)
    return SessionConfig(WORKERS, (table,), (Stream(Operation.SUM, elements),), packet_elements)


def serve(line: Connection, udp: bool, core: int) -> None:
    """The server's process."""
    os.sched_setaffinity(0, {core})
    server = AggregationServer(AggregationOptions(WORKERS, udp=udp))
    line.send(server.address[1])
    server.run(lambda text: None)


def rounds(clients: list[AggregationClient], payloads: list[np.ndarray], outs: list[np.ndarray], first: int) -> int:
    """Rounds for about two seconds; returns how many."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < 2:
        submitted = [
            client.submit(first + count, 0, payload, out) for client, payload, out in zip(clients, payloads, outs)
        ]
        for future in submitted:
            future.result(60)
        count += 1
    return count


def measure(transport: str, packet_elements: int, elements: int) -> Figure:
    """One case."""
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, transport == "udp", 0), daemon=True)
    process.start()
    agreed = config(elements, packet_elements)
    payloads = [
        np.random.default_rng(rank).integers(0, 256, agreed.payload_bytes(0, elements), np.uint8)
        for rank in range(WORKERS)
    ]
    outs = [np.empty(elements, np.uint8) for _ in range(WORKERS)]
    port = line.recv()
    clients = [AggregationClient(("127.0.0.1", port), agreed, rank) for rank in range(WORKERS)]
    rounds(clients, payloads, outs, 0)  # warms up
    before, own = cpu_seconds(process.pid), time.process_time()
    began = time.monotonic()
    count = rounds(clients, payloads, outs, 1 << 20)
    seconds, used = time.monotonic() - began, cpu_seconds(process.pid) - before
    own = time.process_time() - own
    for client in clients:
        client.close()
    process.join(30)
    num_bytes = count * WORKERS * payloads[0].nbytes
    num_packets = count * WORKERS * agreed.num_packets(0)
    return Figure(
        *(transport, packet_elements, num_bytes / seconds, num_bytes / used),
        *(used / num_packets, own / num_packets, elements),
    )


def cpu_seconds(pid: int | None) -> float:
    """Processor time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(elements: Annotated[int, typer.Option(help="Elements of the tensor.")] = 1 << 22) -> Iterator[dict[str, Any]]:
    """All cases."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for transport, packet_elements in CASES:
        yield from measure(transport, packet_elements, elements).rows()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case."""
    lines = []
    for rate in (row for row in rows if row["metric"].endswith("_in")):
        found = {
            row["metric"].removeprefix(rate["metric"].removesuffix("in")): row["value"]
            for row in rows
            if row["packet_elements"] == rate["packet_elements"] and row["metric"].startswith(rate["metric"][:4])
        }
        of_worker = found.get("worker_cpu_per_packet")  # earlier records lack it
        lines.append(
            f"{rate['metric'].removesuffix('_in')} {rate['packet_elements']:7} indices a packet: "
            f"{rate['value'] / 1e6:6.0f} MB/s in, {found['in_per_cpu_second'] / 1e6:6.0f} MB/s of processor time, "
            f"{found['cpu_per_packet'] * 1e6:5.0f} us a packet"
            + ("" if of_worker is None else f", {of_worker * 1e6:5.0f} us of a worker")
        )
    return "\n".join(lines)
