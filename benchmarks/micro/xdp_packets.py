"""Time of a packet of THC's aggregator: in the kernel by its own statistics, and in Python.

Prepared packets of four workers, round after round, go to the XDP program by test runs of the kernel. Its figure is run
time over runs (`bpf_stats`), of all packets together: those that are added and acknowledged, and each fourth, which
also completes a result. The server without I/O gets the same packets. Sockets, interfaces, and the copies of results to
several workers with their tags are in neither figure.
"""
# Shapes: E = indices of a packet

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from gradwire.aggregator.packet import PacketKey, PacketKind, pack
from gradwire.aggregator.server import AggregatorStateMachine
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp.guard import GUARDS
from gradwire.aggregator.xdp.kernel_slots import KernelSlots
from gradwire.aggregator.xdp.seals import ends
from gradwire.aggregator.xdp.system import RunTime, enable_statistics, run_program

WORKERS, PACKETS, ELEMENTS = 4, 64, 1024
PORT = 7071
SECRET = bytes(16)
WHERE = {"packet_elements": ELEMENTS, "ranks": WORKERS, "rate": "none", "source": "measured"}


def config() -> SessionConfig:
    """One tensor of 64 packets, with sums of 8 bits."""
    table = IndexTable(4, tuple(range(16)), 8)
    return SessionConfig(WORKERS, (table,), (Stream(Operation.SUM, PACKETS * ELEMENTS),), ELEMENTS)


def packets(round_: int) -> list[bytes]:
    """Contributions to a round, packet by packet."""
    bodies = np.random.default_rng(round_).integers(0, 256, (PACKETS, WORKERS, ELEMENTS // 2), np.uint8)
    return [
        bytes(pack(PacketKind.DATA, PacketKey(round_, 0, packet), worker, 1, bodies[packet, worker]))
        for packet in range(PACKETS)
        for worker in range(WORKERS)
    ]


def frame(packet: bytes, worker: int) -> bytes:
    """Return a packet of a worker as an Ethernet frame."""
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(packet), 0, 0, 64, 17, 0) + bytes([10, 0, 0, worker, 10, 0, 0, 99])
    return bytes(12) + b"\x08\x00" + ip + struct.pack(">HHHH", 5000, PORT, 8 + len(packet), 0) + packet


def in_kernel(guard: str, rounds: int) -> Iterator[float]:
    """Seconds of a packet, round by round."""
    slots = KernelSlots(config(), guard, PORT)
    slots.begin(1)
    for worker in range(WORKERS):
        slots.join(worker, (f"10.0.0.{worker}", 5000), SECRET, SECRET)
    senders = [ends(guard, SECRET, SECRET)[0] for _ in range(WORKERS)]
    with enable_statistics():
        for round_ in range(rounds):
            frames = [
                frame(packet + senders[place % WORKERS].trailer(np.frombuffer(packet, np.uint8)), place % WORKERS)
                for place, packet in enumerate(packets(round_))
            ]
            before = RunTime(slots.program)
            for each in frames:
                run_program(slots.program, each)
            after = RunTime(slots.program)
            yield (after.nanoseconds - before.nanoseconds) / (after.runs - before.runs) / 1e9
    taken = slots.counted().taken
    slots.close()
    if taken != rounds * WORKERS * PACKETS:
        raise RuntimeError(f"The program has added {taken} packets, not all {rounds * WORKERS * PACKETS}.")


def in_python(rounds: int) -> Iterator[float]:
    """Seconds of a packet in the server without I/O, round by round."""
    machine = AggregatorStateMachine(config(), 1)
    for round_ in range(rounds):
        given = packets(round_)
        began = time.perf_counter()
        for packet in given:
            machine.receive(packet, 0.0)
            machine.flush()
        yield (time.perf_counter() - began) / len(given)


def run(rounds: Annotated[int, typer.Option(help="Rounds of 256 packets each.")] = 200) -> Iterator[dict[str, Any]]:
    """All cases: the median of the rounds with percentiles, and the fastest round."""
    cases = {f"xdp_{name}": in_kernel(name, rounds) for name in sorted(GUARDS)}
    for case, times in {**cases, "python": in_python(rounds)}.items():
        found = np.array(list(times))
        where = {"method": "thc", "case": case, "unit": "s", "samples": found.size, **WHERE}
        low, median, high = (float(each) for each in np.percentile(found, (20, 50, 80)))
        yield {**where, "metric": "packet", "value": median, "p20": low, "p80": high}
        yield {**where, "metric": "fastest_packet", "value": float(found.min())}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case, and against Python's in the same run."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["metric"]] = row["value"]
    return "\n".join(
        f"{case:12} {1e6 * of['packet']:6.2f} us a packet, at least {1e6 * of['fastest_packet']:6.2f}, "
        f"{found['python']['packet'] / of['packet']:5.1f} times as fast as Python's server"
        for case, of in found.items()
    )
