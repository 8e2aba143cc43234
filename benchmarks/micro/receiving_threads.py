"""Contributions a second of an aggregation server over UDP: with one and two receiving threads, and as two servers.

Prepared datagrams of four workers wait in a socket's buffer, and threads process them as a server does: they check tags
and numbers, add, seal results, and send them to addresses at which nobody reads. A second thread shares the socket and
the state of each worker, and sums under one lock, or under two locks with half of the packets each. Two servers are two
processes, each with packets of its own, as a job with two servers has them. Figures are of the median round.

Each thread needs a core for itself. On a busy machine, run it as root with `chrt -f 1` in front.
"""

from __future__ import annotations

import copy
import multiprocessing
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Annotated, Any

import numpy as np
import typer

from gradwire.aggregator.packet import PacketKey, PacketKind, field, pack
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.net.datagrams import MAX_DATAGRAM_BYTES, DatagramReceiver, DatagramSender, DatagramSocket

WORKERS = 4
LOCAL = ("127.0.0.1", 0)
PACKETS = {1024: 40, 8192: 24, 61_440: 10}
"""Packets of a round by their indices. All contributions to them fit the buffer of a socket."""
CASES = {
    "1 thread, no lock": (1, 0),
    "1 thread, 1 lock": (1, 1),
    "2 threads, 1 lock": (2, 1),
    "2 threads, 2 locks": (2, 2),
}
"""Number of threads and of locks."""
SERVERS = "2 servers"
BATCH = 64
"""Datagrams after which a thread acknowledges what has arrived."""
_INDEX, _INDEX_AT = struct.Struct("<I"), field("packet").offset
_PAUSE_SECONDS = 0.005


class Server:
    """A server between its socket's buffer and the workers' addresses.

    Args:
        elements: Indices of a packet.
        threads: Number of receiving threads.
        locks: Number of locks that the packets share; 0 for none.
    """

    def __init__(self, elements: int, threads: int, locks: int) -> None:
        table, stream = IndexTable(4, tuple(range(16)), 8), Stream(Operation.SUM, PACKETS[elements] * elements)
        config = SessionConfig(WORKERS, (table,), (stream,), elements)
        self.elements, self.threads = elements, threads
        self.machines = [AggregatorStateMachine(config, 1) for _ in range(max(1, locks))]
        self.locks = [threading.Lock() if locks else nullcontext() for _ in self.machines]
        self.of_worker = [threading.Lock() if threads > 1 else nullcontext() for _ in range(WORKERS)]
        self.socket, self.workers = DatagramSocket(LOCAL), [DatagramSocket(LOCAL) for _ in range(WORKERS)]
        self.ranks = {each.address: rank for rank, each in enumerate(self.workers)}
        self.bodies = np.random.default_rng(0).integers(0, 256, (WORKERS, elements // 2), np.uint8)
        self.senders = [DatagramSender(bytes(32)) for _ in self.workers]
        self.receivers = [DatagramReceiver(bytes(32)) for _ in self.workers]

    def prepare(self, round_: int) -> None:
        """Send all contributions to a round to the socket."""
        for index in range(PACKETS[self.elements]):
            for rank, worker in enumerate(self.workers):
                made = pack(PacketKind.DATA, PacketKey(round_, 0, index), rank, 1, self.bodies[rank])
                worker.send(made, self.socket.address, self.senders[rank])

    def drain(self) -> None:
        """Process what is in the socket's buffer, on one thread."""
        replies, own = [DatagramSender(bytes(32)) for _ in self.workers], copy.copy(self.socket)
        own._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES + 1))
        while results := [self._take(self.ranks[source], datagram) for source, datagram in own.receive(BATCH)]:
            for messages in (*results, *map(self._flush, range(len(self.machines)))):
                self._send(messages, replies)

    def _flush(self, place: int) -> list[PacketToSend]:
        with self.locks[place]:
            return self.machines[place].flush()

    def _take(self, rank: int, datagram: memoryview) -> list[PacketToSend]:
        with self.of_worker[rank]:
            packet = self.receivers[rank].open(datagram)
        assert packet is not None, "its tag is right"
        place = _INDEX.unpack_from(packet, _INDEX_AT)[0] % len(self.machines)
        with self.locks[place]:
            return self.machines[place].receive(packet, 0.0, rank)

    def _send(self, messages: list[PacketToSend], replies: list[DatagramSender]) -> None:
        for receiver, packet in messages:
            for rank, worker in enumerate(self.workers):
                if receiver in (EVERYONE, rank):
                    self.socket.send(packet, worker.address, replies[rank])

    def rounds(self, count: int, wait: Callable[[], Any] = lambda: None) -> list[float]:
        """Return the seconds of each round; `wait` is called before it."""
        found = []
        for round_ in range(count):
            self.prepare(round_)
            found.append(self._time(threading.Barrier(self.threads + 1), wait))
        for each in (self.socket, *self.workers):
            each.close()
        num_taken = sum(machine.counters.taken for machine in self.machines)
        assert num_taken == count * WORKERS * PACKETS[self.elements], "none was lost"
        return found

    def _time(self, barrier: threading.Barrier, wait: Callable[[], Any]) -> float:
        def drain() -> None:
            barrier.wait()
            self.drain()

        threads = [threading.Thread(target=drain) for _ in range(self.threads)]
        for each in threads:
            each.start()
        time.sleep(_PAUSE_SECONDS)  # the system puts off a thread that has just worked
        wait()
        barrier.wait()
        began = time.perf_counter()
        for each in threads:
            each.join()
        return time.perf_counter() - began


def serve(line: Connection, barrier: Any, elements: int, count: int) -> None:
    """The process of one of two servers."""
    line.send(Server(elements, 1, 0).rounds(count, barrier.wait))


def two_servers(elements: int, count: int) -> list[float]:
    """Seconds of each round of two servers, until both are done."""
    context = multiprocessing.get_context("fork")
    barrier, lines, processes = context.Barrier(2), [], []
    for _ in range(2):
        line, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, barrier, elements, count), daemon=True))
        processes[-1].start()
        lines.append(line)
    found = [line.recv() for line in lines]
    return [max(both) for both in zip(*found, strict=True)]


def run(rounds: Annotated[int, typer.Option(help="Rounds of each case.")] = 200) -> Iterator[dict[str, Any]]:
    """All cases."""
    for elements, packets in PACKETS.items():
        where = {"method": "thc", "ranks": WORKERS, "rate": "none", "source": "measured", "packet_elements": elements}
        num = packets * WORKERS
        rates = {
            case: num / statistics.median(Server(elements, *numbers).rounds(rounds)) for case, numbers in CASES.items()
        }
        rates[SERVERS] = 2 * num / statistics.median(two_servers(elements, rounds))
        for case, rate in rates.items():
            yield {**where, "metric": "contributions", "case": case, "value": rate, "unit": "1/s"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each case."""
    return "\n".join(
        f"{row['packet_elements']:6} indices a packet, {row['case']}: {row['value']:7.0f} contributions a second"
        for row in rows
    )
