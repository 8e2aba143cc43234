"""What checksums, tags and TLS cost a step between a worker and a server, over loopback.

A step sends frames of 256 KiB to a server in another process, which sends each back, as gradients and updates travel.
The two processes share the cores of one machine. The openssl command makes the certificates.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from gradwire.core.errors import SyncError
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.net.tls import TlsFiles
from gradwire.wire.frame import FrameKind, Header

FRAME_BYTES = 1 << 18
STEPS = 15
WORKER, SERVER = 0, 1
KINDS = ("crc", "mac", "tls")


class End:
    """One end. The server's sends each frame back."""

    def __init__(self, rank: int, kind: str, folder: Path, where: socket.socket | tuple[str, int]) -> None:
        member, key = GroupMember("protection", rank, 2, 1), JobKey(bytes(32), "mac" if kind == "mac" else "crc")
        self.rank = rank
        self.frames: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        context = certificate(folder).context(server=rank == SERVER) if kind == "tls" else None
        there: dict[str, Any] = {"listener": where, "callers": frozenset({WORKER})}
        if rank == WORKER:
            there = {"call": (SERVER, where)}
        self.endpoint = ReconnectingEndpoint(member, key, self, timeout=timedelta(seconds=30), tls=context, **there)
        self.endpoint.start()

    def send(self, body: np.ndarray) -> None:
        self.endpoint.send(1 - self.rank, Header(FrameKind.PAYLOAD, sender=self.rank, epoch=1), body)

    def admit(self, peer: int, header: Header) -> None:
        """Take every frame."""

    def joined(self, peer: int) -> None:
        if self.rank == WORKER:
            self.frames.put(None)

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        if self.rank == SERVER:
            self.send(body)
        else:
            self.frames.put(body)

    def left(self, peer: int, error: SyncError | None) -> None:
        self.frames.put(None)

    def failed(self, error: SyncError) -> None:
        self.frames.put(None)


def certificate(folder: Path) -> TlsFiles:
    """One certificate for both ends, which is its own authority."""
    made = TlsFiles(folder / "end.pem", folder / "end.key", folder / "end.pem")
    if not (folder / "end.pem").exists():
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=end"
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(made.key), "-out", str(made.certificate)]
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
        (folder / "end.key").chmod(0o600)
    return made


def serve(line: Connection, kind: str, folder: Path) -> None:
    """The server's process."""
    listener = socket.create_server(("127.0.0.1", 0))
    line.send(listener.getsockname())
    end = End(SERVER, kind, folder, listener)
    end.frames.get()  # until the worker has left
    end.endpoint.close()


def steps(kind: str, num_bytes: int, folder: Path) -> list[float]:
    """Seconds of each step."""
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, kind, folder))
    process.start()
    worker = End(WORKER, kind, folder, line.recv())
    worker.frames.get()
    body, seconds = np.zeros(FRAME_BYTES, np.uint8), []
    for _ in range(STEPS):
        began, num_frames = time.perf_counter(), -(-num_bytes // FRAME_BYTES)
        for _ in range(num_frames):
            worker.send(body)
        for _ in range(num_frames):
            if worker.frames.get() is None:
                raise SyncError(f"The server under {kind} is gone.")
        seconds.append(time.perf_counter() - began)
    worker.endpoint.close()
    process.join(30)
    return seconds[2:]  # after warming up


def run(num_bytes: Annotated[int, typer.Option(help="Bytes each way in a step.")] = 25_000_000) -> Iterator[Any]:
    """One row for each kind of protection."""
    with tempfile.TemporaryDirectory() as folder:
        certificate(Path(folder))
        for kind in KINDS:
            seconds = steps(kind, num_bytes, Path(folder))
            yield {
                "method": kind, "metric": "step", "unit": "s", "value": statistics.median(seconds), "size": num_bytes,
                "worst": max(seconds), "ranks": 2,
            }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each kind."""
    return "\n".join(
        f"{row['method']}: {1e3 * row['value']:7.1f} ms a step of {row['size'] / 1e6:g} MB each way "
        f"(worst {1e3 * row['worst']:.1f})"
        for row in rows
    )
