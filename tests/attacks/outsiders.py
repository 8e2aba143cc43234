"""What somebody without the job key may do, in a process of its own. Each function returns what was sent and got."""

from __future__ import annotations

import contextlib
import random
import socket
import time

from gradwire.net.datagrams import TRAILER_BYTES
from tests.integration.flood import Connections, Datagrams, Flood, addresses, paced

Address = tuple[str, int]
OTHERS, SHARED = "127.0.1.1+200", "127.0.0.1"
"""Addresses of a flood: 200 of its own, or that of all workers."""
WORLD_SIZE = 4
"""Three workers and their server."""
PATIENCE_S = 60.0
_PAUSE_S = 5e-4


def warm_up() -> None:
    """Import what the attacks need."""


def connections(address: Address, kind: str, number: int) -> Flood:
    """Open connections of this kind (see `Connections`) and wait until the server has closed all of them."""
    made = Connections(address, addresses(OTHERS), (kind,), world_size=WORLD_SIZE)
    deadline = time.monotonic() + PATIENCE_S
    while made.flood.closed < number and time.monotonic() < deadline:
        if made.flood.sent < number:
            made.act()
        made.rest(_PAUSE_S if made.flood.sent < number else 0.1)
    return made.close()


def replay(address: Address, session: bytes, number: int) -> Flood:
    """Send what a worker has sent in a whole session, again and again."""
    flood = Flood()
    for _ in range(number):
        with socket.create_connection(address, PATIENCE_S) as sock, contextlib.suppress(ConnectionError):
            flood.sent += 1
            flood.sent_bytes += sock.send(session)
            while answer := sock.recv(1 << 16):
                flood.got_bytes += len(answer)
        flood.closed += 1
    return flood


def datagrams(address: Address, recorded: list[bytes], number: int) -> Flood:
    """Send datagrams that others have sent, in turns, from a port of its own."""
    made = Datagrams(address, ["127.0.0.1"], recorded)
    for _ in range(number):
        made.act()
        made.rest(_PAUSE_S)
    return made.close()


def forged(address: Address, recorded: list[bytes], number: int) -> Flood:
    """Send packets that others have sent, with the next numbers and made-up tags."""
    draw = random.Random(0)
    made = [each[:-TRAILER_BYTES] + (1 << 20).to_bytes(8, "little") + draw.randbytes(16) for each in recorded]
    return datagrams(address, made, number)


def flood(address: Address, kind: str, sources: str, rate: float, seconds: float) -> Flood:
    """Open connections of all kinds (``"connect"``) or send garbage (``"send"``), at a rate per second."""
    made: Connections | Datagrams
    if kind == "connect":
        made = Connections(address, addresses(sources), world_size=WORLD_SIZE)
    else:
        made = Datagrams(address, addresses(sources))
    paced(rate, seconds, made.act, made.rest)
    return made.close()
