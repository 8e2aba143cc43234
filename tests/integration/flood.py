"""Programs of the hosts in tests of floods. Each prints JSON on one line at its end.

flood.py serve LISTENER PORT                     a server for one worker, or rank 0 of two; prints "ready" first
flood.py work LISTENER STEPS PAUSE               its worker, or rank 1; takes this many steps, and PAUSE seconds for
                                                 each step of a handshake
flood.py pace LISTENER                           the same, but takes steps until a SIGTERM comes, and prints when each
                                                 of them ended; "ready" first
flood.py connect HOST PORT RATE SECONDS SOURCES  opens RATE connections a second, and proves nothing
flood.py greet HOST PORT RATE SECONDS SOURCES    the same at a listener under TLS, which some of them greet
flood.py send HOST PORT RATE SECONDS SOURCES     sends RATE datagrams a second

LISTENER is "mesh", "parameters", "tls" (parameters under TLS), "aggregator" or "datagrams". SOURCES are the addresses
to send from, such as 10.78.0.1+200 for 200 of them. A flood prints "flooding" when a second of it has passed, and ends
early at SIGTERM.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import queue
import random
import select
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.net import pending
from gradwire.net.client import ConnectionOptions
from gradwire.net.handshake import PROOF_BYTES, GroupMember, Handshake, JobKey
from gradwire.net.keys import given_key, job_epoch
from gradwire.net.rendezvous import Deadline, Meeting
from gradwire.net.tcp import TcpTransport
from gradwire.net.tls import TlsFiles
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from gradwire.wire.frame import FrameKind, Header
from tests.aggregator.aggregation_job import submit_all
from tests.net.recorder import header, start
from tests.schedules import jobs

LISTENERS = "mesh", "parameters", "tls", "aggregator", "datagrams"
CERTIFICATES = "FLOOD_CERTIFICATES"
"""Variable with the folder of the certificates of "server" and "worker"."""
PORT = 7071
CONFIG = SessionConfig(1, (jobs.WIDE,), (Stream(Operation.SUM, 200_000), Stream(Operation.MAXIMUM, 200)), 1024)
LIMIT = timedelta(seconds=60)
FRAME_BYTES = 100_000


def say(text: str) -> None:
    print(text, flush=True)


# -- the job -----------------------------------------------------------------------------------------------------


def serve(listener: str, port: int) -> None:
    address = os.environ["MASTER_ADDR"], port
    if listener == "mesh":
        with socket.create_server(address, backlog=1024) as sock:
            say("ready")
            echo(mesh(0, sock))
        return
    if listener in ("parameters", "tls"):
        server = ParameterServer(ParameterServerOptions(1, *address, tls=certificates("server", listener)))
    else:
        server = AggregationServer(AggregationOptions(1, *address, udp=listener == "datagrams"))
    say("ready")
    server.run(lambda text: None)


def certificates(name: str, listener: str) -> TlsFiles | None:
    """Certificates of an end, if the listener needs them."""
    if listener != "tls":
        return None
    folder = Path(os.environ[CERTIFICATES])
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")


class SlowHandshake(Handshake):
    """A handshake that takes its time."""

    pause = 0.0

    def opening(self) -> bytes:
        time.sleep(self.pause)
        return super().opening()

    def receive(self, header: Header, body: np.ndarray) -> bytes:
        time.sleep(self.pause)
        return super().receive(header, body)


def work(listener: str, num_steps: int, pause: float) -> None:
    SlowHandshake.pause = pause
    pending.Handshake = SlowHandshake  # type: ignore[misc]
    began = time.monotonic()
    client, steps = join(listener)
    connected = time.monotonic()
    found = hashlib.sha256()
    for _ in range(num_steps):
        found.update(next(steps))
    client.close()
    say(json.dumps({"connect_s": connected - began, "digest": found.hexdigest()}))


def pace(listener: str) -> None:
    client, steps = join(listener)
    ended: list[float] = []
    with stopped_by(signal.SIGTERM) as stopped:
        while not stopped:
            next(steps)
            ended.append(time.monotonic())
            if len(ended) == 1:
                say("ready")
    client.close()
    say(json.dumps(ended))


@contextlib.contextmanager
def stopped_by(number: signal.Signals) -> Iterator[list[int]]:
    """A list that is empty until the signal comes."""
    stopped: list[int] = []
    before = signal.signal(number, lambda number, frame: stopped.append(number))
    try:
        yield stopped
    finally:
        signal.signal(number, before)


def join(listener: str) -> tuple[Any, Iterator[bytes]]:
    """Connect a worker. Returns its end, which is to be closed, and the results of its steps."""
    address = os.environ["MASTER_ADDR"], PORT
    connection = ConnectionOptions(timeout=LIMIT, tls=certificates("worker", listener))
    torch.manual_seed(0)
    model = torch.nn.Linear(500, 400)
    if listener == "mesh":
        transport = mesh(1)
        return transport, exchange(transport)
    if listener in ("parameters", "tls"):
        client = gw.ParameterClient(
            model, torch.optim.SGD(model.parameters(), 0.1), f"{address[0]}:{PORT}",
            job=gw.JobOptions(worker=0, workers=1), connection=connection,
        )  # fmt: skip
        return client, train(client)
    aggregation = AggregationClient(address, CONFIG, 0, connection=connection)
    return aggregation, aggregate(aggregation)


def train(client: gw.ParameterClient) -> Iterator[bytes]:
    draw = torch.Generator().manual_seed(1)
    while True:
        loss = client.model(torch.randn(8, 500, generator=draw)).square().mean()
        loss.backward()
        client.step()
        yield loss.detach().numpy().tobytes()


def aggregate(client: AggregationClient) -> Iterator[bytes]:
    for round_ in range(1 << 30):
        submitted = submit_all(client, round_)
        for _, future in submitted:
            future.result(LIMIT.total_seconds())
        yield b"".join(out.tobytes() for out, _ in submitted)


def mesh(rank: int, listener: socket.socket | None = None) -> TcpTransport:
    key = given_key()
    assert key is not None
    member = GroupMember("flood", rank, 2, job_epoch("gradwire"))
    addresses = [(os.environ["MASTER_ADDR"], PORT), ("127.0.0.1", 9)]
    return TcpTransport(Meeting(member, key, addresses), listener, Deadline(3 * LIMIT), timeout=LIMIT)


def exchange(transport: TcpTransport) -> Iterator[bytes]:
    recorder, draw = start(transport), np.random.default_rng(0)
    while True:
        sent = draw.integers(0, 256, FRAME_BYTES, dtype=np.uint8)
        transport.send(0, header(transport), sent)
        _, _, body = recorder.frame()
        yield body.tobytes()


def echo(transport: TcpTransport) -> None:
    """Send back what comes, until the other rank leaves."""
    left: list[int] = []
    recorder = start(transport, needs=lambda peer, said_goodbye: bool(left.append(peer)))
    while not left:
        with contextlib.suppress(queue.Empty):
            _, _, body = recorder.frames.get(timeout=0.1)
            transport.send(1, header(transport), body)
    transport.close()


# -- the flood ---------------------------------------------------------------------------------------------------


@dataclass
class Flood:
    """What a flood has sent, and what it got.

    Attributes:
        sent: Connections opened, or datagrams sent.
        sent_bytes: Bytes in them, without headers of TCP, UDP and IP.
        got_bytes: Bytes of answers.
        closed: Connections that the other end has refused or closed.
        processor_s: Processor time of the flood itself.
    """

    sent: int = 0
    sent_bytes: int = 0
    got_bytes: int = 0
    closed: int = 0
    processor_s: float = 0.0


def paced(
    rate: float, seconds: float, act: Callable[[], None], rest: Callable[[float], None],
    begun: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Act `rate` times a second, and `rest` for the time between, until the time is up or a SIGTERM comes.

    After a second, `begun` is called once.
    """
    began, done, told = time.monotonic(), 0, False
    with stopped_by(signal.SIGTERM) as stopped:
        while (now := time.monotonic() - began) < seconds and not stopped:
            while done < now * rate:
                act()
                done += 1
            if now > 1 and not told:
                told = True
                begun()
            rest(max(0.0, done / rate - now))


def hello() -> bytes:
    """The first message of a TLS connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


KINDS = {"connect": ("silent", "garbage", "forged"), "greet": ("silent", "garbage", "hello")}


class Connections:
    """Connections that prove nothing, from one source after another.

    Args:
        address: Where they go.
        sources: Addresses that they come from.
        kinds: What becomes of one after another: ``"silent"``, ``"garbage"``, ``"forged"`` for a handshake without the
            job key, or ``"hello"`` for the first message of TLS, which costs the other end a signature.
        world_size: Of the group whose handshake is forged.
    """

    _MOST_OPEN = 4000

    def __init__(
        self,
        address: tuple[str, int],
        sources: list[str],
        kinds: tuple[str, ...] = KINDS["connect"],
        *,
        world_size: int = 2,
    ) -> None:
        self.flood = Flood()
        self.open: dict[int, tuple[socket.socket, bytes, Handshake | None]] = {}  # and what it says first
        self._hello = hello()
        self._address, self._sources, self._kinds = address, cycle(sources), cycle(kinds)
        self._world_size = world_size
        self._draw, self._poll = random.Random(0), select.epoll()

    def act(self) -> None:
        """Open one more."""
        if len(self.open) >= self._MOST_OPEN:
            self._end(next(iter(self.open)))
        sock, kind = socket.socket(), next(self._kinds)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: all ports for each source
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ports are free at once
        sock.bind((next(self._sources), 0))
        with contextlib.suppress(OSError):  # under way, or refused already
            sock.connect(self._address)
        handshake = self._handshake() if kind == "forged" else None
        words = handshake.opening() if handshake else self._hello if kind == "hello" else self._draw.randbytes(100)
        self.open[sock.fileno()] = sock, words, handshake
        self._poll.register(sock, select.EPOLLIN if kind == "silent" else select.EPOLLOUT)
        self.flood.sent += 1

    def rest(self, seconds: float) -> None:
        """Go on with those that are open, for at most these seconds."""
        for fd, events in self._poll.poll(seconds):
            sock, words, handshake = self.open[fd]
            try:
                if events & select.EPOLLOUT:
                    self._send(sock, words)
                    self._poll.modify(sock, select.EPOLLIN)
                elif answer := sock.recv(4096):
                    self.flood.got_bytes += len(answer)
                    if handshake:
                        self._send(sock, handshake._frame(FrameKind.PROOF, self._draw.randbytes(PROOF_BYTES)))
                else:
                    self._end(fd, closed=True)
            except OSError:
                self._end(fd, closed=True)

    def close(self) -> Flood:
        """Close all that are open."""
        for fd in list(self.open):
            self._end(fd)
        self._poll.close()
        self.flood.processor_s = time.process_time()
        return self.flood

    def _handshake(self) -> Handshake:
        rank = self._draw.randrange(self._world_size)
        member = GroupMember("gradwire", rank, self._world_size, job_epoch("gradwire"))
        return Handshake(member, JobKey(bytes(32)), frozenset({self._world_size - 1 - rank}), connect=True)

    def _send(self, sock: socket.socket, words: bytes) -> None:
        self.flood.sent_bytes += sock.send(words)

    def _end(self, fd: int, *, closed: bool = False) -> None:
        self._poll.unregister(fd)
        self.open.pop(fd)[0].close()
        self.flood.closed += closed


class Datagrams:
    """Datagrams that prove nothing, from one source after another.

    Args:
        address: Where they go.
        sources: Addresses that they come from.
        datagrams: What they are, in turns; default: random bytes of these `SIZES`.
    """

    SIZES = 0, 16, 60, 68, 800, 1400

    def __init__(self, address: tuple[str, int], sources: list[str], datagrams: Sequence[bytes] = ()) -> None:
        self.flood = Flood()
        draw = random.Random(0)
        self._address, self._sockets = address, []
        self._datagrams = cycle(datagrams or [draw.randbytes(size) for size in self.SIZES])
        for source in sources:
            self._sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            self._sockets[-1].bind((source, 0))
            self._sockets[-1].setblocking(False)
        self._turns = cycle(self._sockets)

    def act(self) -> None:
        """Send one more."""
        with contextlib.suppress(OSError):  # no room, or nobody at that port
            self.flood.sent_bytes += next(self._turns).sendto(next(self._datagrams), self._address)
            self.flood.sent += 1

    def rest(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def close(self) -> Flood:
        """Count what has come back."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                while True:
                    self.flood.got_bytes += len(sock.recv(1 << 16))
            sock.close()
        self.flood.processor_s = time.process_time()
        return self.flood


def addresses(sources: str) -> list[str]:
    """The addresses in words such as 10.78.0.1+200."""
    first, _, count = sources.partition("+")
    return [str(ipaddress.ip_address(first) + each) for each in range(int(count or 1))]


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "serve":
        serve(rest[0], int(rest[1]))
    elif command == "work":
        work(rest[0], int(rest[1]), float(rest[2]))
    elif command == "pace":
        pace(rest[0])
    else:
        host, port, rate, seconds, sources = rest
        where = (host, int(port)), addresses(sources)
        made = Datagrams(*where) if command == "send" else Connections(*where, KINDS[command])
        paced(float(rate), float(seconds), made.act, made.rest, lambda: say("flooding"))
        say(json.dumps(asdict(made.close())))


if __name__ == "__main__":
    main()
