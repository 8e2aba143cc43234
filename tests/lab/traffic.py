"""What the hosts of the lab tests run: small senders and receivers, bounded in bytes and time.

stream SECONDS   host 0 receives for that long from every other host; prints its interface's bytes
bytes COUNT      host 1 sends COUNT bytes to host 0 by TCP
datagrams COUNT  host 1 sends COUNT datagrams to host 0, paced by acknowledgements by TCP in between
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SERVER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
WAIT_S = 10.0


def interface() -> tuple[int, int]:
    """Bytes received and sent at this host's interface, read as one that knows nothing of gradwire would."""
    name = os.environ["GRADWIRE_LAB_INTERFACE"]
    with open("/proc/net/dev") as file:
        fields = next(line for line in file if line.strip().startswith(f"{name}:")).split(":")[1].split()
    return int(fields[0]), int(fields[8])


def connect() -> socket.socket:
    """A connection to host 0, which may not listen yet."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(SERVER, timeout=WAIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


def accept(count: int) -> list[socket.socket]:
    with socket.create_server(SERVER, backlog=count) as server:
        server.settimeout(WAIT_S)
        return [server.accept()[0] for _ in range(count)]


def stream(seconds: float) -> None:
    if RANK != 0:
        block = bytes(1 << 16)
        with connect() as link:
            try:
                while True:
                    link.sendall(block)
            except (BrokenPipeError, ConnectionResetError):
                return
    links = accept(WORLD_SIZE - 1)
    selector = selectors.DefaultSelector()
    for link in links:
        selector.register(link, selectors.EVENT_READ)
    # The slow start of TCP is not what is measured.
    start, received, measuring = time.monotonic(), 0, False
    begin, warm_up = start, min(0.3, seconds / 3)
    while time.monotonic() - start < seconds:
        for key, _ in selector.select(WAIT_S):
            key.fileobj.recv(1 << 18)
        if not measuring and time.monotonic() - start >= warm_up:
            measuring, begin, received = True, time.monotonic(), interface()[0]
    end, total = time.monotonic(), interface()[0]
    for link in links:
        link.close()
    print(json.dumps({"bytes": total - received, "seconds": end - begin}))


def count_bytes(count: int) -> None:
    if RANK == 1:
        with connect() as link:
            link.sendall(bytes(count))
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b"."
    elif RANK == 0:
        (link,) = accept(1)
        received = 0
        control = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        with link:
            while chunk := link.recv(1 << 18):
                received += len(chunk)
            link.sendall(b".")
            link.recv(1)
        assert received == count, received
        print(json.dumps({"interface": interface(), "congestion_control": control}))


def datagrams(count: int) -> None:
    """Batches of datagrams, each followed by a byte by TCP that is answered, so that no buffer overflows."""
    batch = 100
    if RANK == 1:
        with connect() as link, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            for start in range(0, count, batch):
                for _ in range(start, min(start + batch, count)):
                    out.sendto(bytes(16), SERVER)
                link.sendall(b".")
                assert link.recv(1) == b"."
    elif RANK == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as into:
            into.bind(SERVER)
            into.setblocking(False)
            (link,) = accept(1)
            received = 0
            with link:
                while link.recv(1):
                    try:
                        while into.recv(64):
                            received += 1
                    except BlockingIOError:
                        link.sendall(b".")
        print(json.dumps({"received": received}))


if __name__ == "__main__":
    {
        "stream": lambda: stream(float(sys.argv[2])),
        "bytes": lambda: count_bytes(int(sys.argv[2])),
        "datagrams": lambda: datagrams(int(sys.argv[2])),
    }[sys.argv[1]]()
