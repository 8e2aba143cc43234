"""Programs of the hosts in tests of floods. Each prints JSON on one line at its end.

flood.py serve LISTENER                          a server for one worker, or rank 0 of two; prints "ready" first
flood.py work LISTENER STEPS PAUSE               its worker, or rank 1; takes this many steps, and PAUSE seconds for
                                                 each step of a handshake
flood.py connect ADDRESS RATE SECONDS SOURCES    opens RATE connections a second to ADDRESS, and proves nothing
flood.py send ADDRESS RATE SECONDS SOURCES       sends RATE datagrams a second to ADDRESS

LISTENER is "mesh", "parameters", "aggregator" or "datagrams". SOURCES are the addresses to send from, such as
10.78.0.1+200 for 200 of them. A flood prints "flooding" when a second of it has passed.
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
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle

import numpy as np
import torch

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.process import AggregationOptions, AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.net import pending
from gradwire.net.client import ConnectionOptions
from gradwire.net.handshake import GroupMember, Handshake, JobKey
from gradwire.net.keys import given_key, job_epoch
from gradwire.net.rendezvous import Deadline, Meeting
from gradwire.net.tcp import TcpTransport
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from gradwire.wire.frame import Header
from tests.aggregator.aggregation_job import submit_all
from tests.net.recorder import header, start
from tests.schedules import jobs

LISTENERS = "mesh", "parameters", "aggregator", "datagrams"
PORT = 7071
CONFIG = SessionConfig(1, (jobs.WIDE,), (Stream(Operation.SUM, 200_000), Stream(Operation.MAXIMUM, 200)), 1024)
LIMIT = timedelta(seconds=20)
FRAME_BYTES = 100_000
_MOST_OPEN = 4000


def say(text: str) -> None:
    print(text, flush=True)


# -- the job -----------------------------------------------------------------------------------------------------


def serve(listener: str) -> None:
    address = os.environ["MASTER_ADDR"], PORT
    if listener == "mesh":
        with socket.create_server(address, backlog=1024) as sock:
            say("ready")
            echo(mesh(0, sock))
        return
    if listener == "parameters":
        server = ParameterServer(ParameterServerOptions(1, *address))
    else:
        server = AggregationServer(AggregationOptions(1, *address, udp=listener == "datagrams"))
    say("ready")
    server.run(lambda text: None)


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
    address, connection = (os.environ["MASTER_ADDR"], PORT), ConnectionOptions(timeout=LIMIT)
    torch.manual_seed(0)
    model = torch.nn.Linear(500, 400)
    began = time.monotonic()
    if listener == "mesh":
        client = mesh(1)
        steps = exchange(client)
    elif listener == "parameters":
        client = gw.ParameterClient(
            model, torch.optim.SGD(model.parameters(), 0.1), f"{address[0]}:{PORT}",
            job=gw.JobOptions(worker=0, workers=1), connection=connection,
        )  # fmt: skip
        steps = train(client)
    else:
        client = AggregationClient(address, CONFIG, 0, connection=connection)
        steps = aggregate(client)
    connected = time.monotonic()
    found = hashlib.sha256()
    for _ in range(num_steps):
        found.update(next(steps))
    ended = time.monotonic()
    client.close()
    say(json.dumps({"connect_s": connected - began, "steps_s": ended - connected, "digest": found.hexdigest()}))


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


def paced(rate: float, seconds: float, act: Callable[[], None], rest: Callable[[float], None]) -> int:
    """Act `rate` times a second, and `rest` for the time between. Returns how often it has acted."""
    began, done, told = time.monotonic(), 0, False
    while (now := time.monotonic() - began) < seconds:
        while done < now * rate:
            act()
            done += 1
        if now > 1 and not told:
            told = True
            say("flooding")
        rest(max(0.0, done / rate - now))
    return done


def connect(address: tuple[str, int], rate: float, seconds: float, sources: list[str]) -> None:
    """A third of the connections say nothing, a third send garbage, a third answer their challenge with garbage."""
    draw, poll = random.Random(0), select.epoll()
    source, open_ = cycle(sources), dict[int, tuple[socket.socket, Handshake | None]]()
    ended = {"refused": 0, "failed": 0}

    def act() -> None:
        if len(open_) >= _MOST_OPEN:
            end(next(iter(open_)), "failed")
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: all ports for each source
        sock.bind((next(source), 0))
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
        kind, rank = draw.randrange(3), draw.randrange(2)
        member = GroupMember("flood", rank, 2, job_epoch("gradwire"))
        handshake = Handshake(member, JobKey(bytes(32)), frozenset({1 - rank}), connect=True) if kind == 2 else None
        open_[sock.fileno()] = sock, handshake
        poll.register(sock, select.EPOLLOUT if kind else select.EPOLLIN)

    def rest(wait: float) -> None:
        for fd, events in poll.poll(wait):
            sock, handshake = open_[fd]
            try:
                if events & select.EPOLLOUT:
                    sock.send(handshake.opening() if handshake else draw.randbytes(100))
                    poll.modify(sock, select.EPOLLIN)
                elif sock.recv(4096):
                    sock.send(draw.randbytes(104))
                else:
                    end(fd, "refused")
            except OSError as error:
                end(fd, "failed" if isinstance(error, TimeoutError) else "refused")

    def end(fd: int, how: str) -> None:
        poll.unregister(fd)
        open_.pop(fd)[0].close()
        ended[how] += 1

    sent = paced(rate, seconds, act, rest)
    say(json.dumps({"opened": sent, "still_open": len(open_), **ended}))
    for sock, _ in open_.values():
        sock.close()


def send(address: tuple[str, int], rate: float, seconds: float, sources: list[str]) -> None:
    draw, socks = random.Random(0), []
    for source in sources:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((source, 0))
        sock.setblocking(False)
        socks.append(sock)
    turn, datagrams = cycle(socks), [draw.randbytes(size) for size in (0, 16, 60, 68, 800, 1400)]
    lost = 0

    def act() -> None:
        nonlocal lost
        try:
            next(turn).sendto(draw.choice(datagrams), address)
        except OSError:
            lost += 1

    sent = paced(rate, seconds, act, time.sleep)
    answers = 0
    for sock in socks:
        with contextlib.suppress(BlockingIOError):
            answers += len(sock.recv(1 << 16))
        sock.close()
    say(json.dumps({"sent": sent - lost, "answer_bytes": answers}))


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "serve":
        serve(rest[0])
    elif command == "work":
        work(rest[0], int(rest[1]), float(rest[2]))
    else:
        host, rate, seconds, sources = rest
        first, _, count = sources.partition("+")
        addresses = [str(ipaddress.ip_address(first) + each) for each in range(int(count or 1))]
        {"connect": connect, "send": send}[command]((host, PORT), float(rate), float(seconds), addresses)


if __name__ == "__main__":
    main()
