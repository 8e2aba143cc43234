"""Speed of frames over TCP on loopback, with checksums and with tags, and of plain sockets that carry the same bytes.

Two processes share the cores of one machine. With two cores, sender and receiver have one each, and other load on the
machine shows. The plain sockets do only what any program must: copy into the kernel and out of it.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.distributed as dist

from gradwire.core.errors import SyncError
from gradwire.net.handshake import INTEGRITIES
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

SMALL_BYTES, BIG_BYTES = 100, 25_000_000
ROUND_TRIPS, BIG_FRAMES, BURST = 2000, 20, 5000
ECHO, ACKNOWLEDGE, COUNT = 0, 1, 2
PATIENCE_SECONDS = 60.0


Row = dict[str, Any]


class Frames:
    """One end of a TCP transport. Rank 1 answers as the tensor id of the header asks."""

    def __init__(self, rank: int, store: dist.Store, integrity: str) -> None:
        self.of = f"gradwire {integrity}"
        self.transport = TcpTransport.connect(
            store, rank, 2, timeout=timedelta(seconds=30), name=f"benchmark {integrity}", integrity=integrity
        )
        self.answers: queue.SimpleQueue[Header | SyncError] = queue.SimpleQueue()
        deliver = self.answer if rank else lambda peer, header, body: self.answers.put(header)
        self.transport.start(Callbacks(lambda peer, header: None, deliver, self.fail))

    def fail(self, error: SyncError) -> None:
        self.answers.put(error)

    def wait(self) -> None:
        """Wait for the next answer.

        Raises:
            SyncError: The other process is gone.
            queue.Empty: It does not answer.
        """
        answer = self.answers.get(timeout=PATIENCE_SECONDS)
        if isinstance(answer, SyncError):
            raise answer

    def answer(self, peer: int, header: Header, body: np.ndarray) -> None:
        if header.tensor == ECHO:
            self.send(body, ECHO)
        elif header.tensor == ACKNOWLEDGE or header.partition == BURST - 1:
            self.send(np.empty(0, dtype=np.uint8), header.tensor)

    def send(self, body: np.ndarray, tensor: int, partition: int = 0) -> None:
        transport = self.transport
        header = Header(
            FrameKind.PAYLOAD, sender=transport.rank, epoch=transport.epoch, tensor=tensor, partition=partition
        )
        transport.send(1 - transport.rank, header, body)

    def round_trip(self, body: np.ndarray) -> None:
        self.send(body, ECHO)
        self.wait()

    def deliver(self, body: np.ndarray) -> None:
        self.send(body, ACKNOWLEDGE)
        self.wait()

    def burst(self, body: np.ndarray) -> None:
        for partition in range(BURST):
            self.send(body, COUNT, partition)
        self.wait()


class Bare:
    """One end of a plain blocking socket that carries the same number of bytes."""

    of = "bare socket"

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.head = bytes(HEADER_BYTES)

    def serve(self) -> None:
        for _ in range(ROUND_TRIPS):
            self.socket.sendall(self.take(HEADER_BYTES + SMALL_BYTES))
        for _ in range(BIG_FRAMES):
            self.take(HEADER_BYTES + BIG_BYTES)
            self.socket.sendall(self.head)

    def take(self, num_bytes: int) -> memoryview:
        room = np.empty(num_bytes, dtype=np.uint8).data
        filled = 0
        while filled < num_bytes:
            filled += self.socket.recv_into(room[filled:])
        return room

    def round_trip(self, body: np.ndarray) -> None:
        self.socket.sendall(self.head + body.tobytes())
        self.take(HEADER_BYTES + body.nbytes)

    def deliver(self, body: np.ndarray) -> None:
        self.socket.sendall(self.head)
        self.socket.sendall(body.data)
        self.take(HEADER_BYTES)


def peer(pipe: Connection) -> None:
    """The other process: rank 1 of the transport, then the server of the plain socket."""
    store = dist.TCPStore("127.0.0.1", pipe.recv(), 2, False)
    for integrity in INTEGRITIES:
        frames = Frames(1, store, integrity)
        pipe.recv()
        frames.transport.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        with listener.accept()[0] as sock:
            Bare(sock).serve()


def timed(action: Callable[[np.ndarray], Any], body: np.ndarray, repetitions: int) -> list[float]:
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        action(body)
        seconds.append(time.perf_counter() - began)
    return seconds


def row(measure: str, of: str, unit: str, figures: list[float], worst: Callable[[list[float]], float]) -> Row:
    value = statistics.median(figures)
    return {"method": of, "metric": measure, "unit": unit, "value": value, "worst": worst(figures), "ranks": 2}


def measure(end: Frames | Bare) -> list[Row]:
    small, big = np.zeros(SMALL_BYTES, dtype=np.uint8), np.zeros(BIG_BYTES, dtype=np.uint8)
    trips = [1e6 * seconds for seconds in timed(end.round_trip, small, ROUND_TRIPS)]
    rates = [BIG_BYTES / seconds / 1e9 for seconds in timed(end.deliver, big, BIG_FRAMES)]
    rows = [
        row(f"round trip of {SMALL_BYTES} bytes", end.of, "us", trips, max),
        row(f"one frame of {BIG_BYTES // 10**6} MB", end.of, "GB/s", rates, min),
    ]
    if isinstance(end, Frames):
        bursts = [BURST / seconds / 1e3 for seconds in timed(end.burst, small, 5)]
        rows.append(row(f"{BURST} frames of {SMALL_BYTES} bytes", end.of, "thousand/s", bursts, min))
    return rows


def run() -> list[Row]:
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    other = processes.Process(target=peer, args=(theirs,), daemon=True)
    other.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipe.send(port)
    store, rows = dist.TCPStore("127.0.0.1", port, 2, True), []
    for integrity in INTEGRITIES:
        frames = Frames(0, store, integrity)
        rows += measure(frames)
        pipe.send("done")
        frames.transport.close()
    with socket.create_connection(("127.0.0.1", pipe.recv())) as sock:
        rows += measure(Bare(sock))
    other.join(PATIENCE_SECONDS)
    return rows


def table(rows: list[Row]) -> str:
    """One line for each figure."""
    return "\n".join(
        f"{row['metric']:28} {row['method']:12} {row['value']:9.2f} {row['unit']:10} (worst {row['worst']:.2f})"
        for row in rows
    )
