"""Somebody on the way between a worker and its server, who sees everything and can write into the connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, pack, parse, without_seal

WAIT = 20.0
Frames = Callable[[list[bytes], list[bytes]], list[bytes]]
"""What an attacker makes of the frames of a worker, having seen those of the server."""


def rewritten(whole: bytes, body: bytes | None = None, **fields: int) -> bytes:
    """The frame with other content; a checksum is made to fit, as anybody can."""
    prefix = prefix_of(whole)
    if prefix == HEADER_BYTES:
        header, content = parse(whole)
        plain = without_seal(header)
        return pack(Header(**{**{name: getattr(plain, name) for name in plain.__slots__}, **fields}), body or content)
    changed = bytearray(whole)
    if body is not None:
        changed[prefix : prefix + len(body)] = body
    for value in fields.values():
        struct.pack_into("<Q", changed, 24, value)
    return bytes(changed)


def prefix_of(whole: bytes) -> int:
    return HEADER_BYTES if whole[4] == 1 else HEADER_BYTES + 16


def cut(stream: bytes) -> tuple[list[bytes], bytes]:
    """The whole frames at the start of a stream, and the rest."""
    frames = []
    while len(stream) >= HEADER_BYTES:
        size = prefix_of(stream) + int.from_bytes(stream[56:64], "little")
        if len(stream) < size:
            break
        frames.append(stream[:size])
        stream = stream[size:]
    return frames, stream


class Attacker:
    """Passes the connection of a worker on. Once it has 3 data frames of its, it passes on what it makes of them.

    Args:
        server: Address of the server.
        attack: What it makes of them.
        kind: What the data frames are.

    Attributes:
        address: Where the worker finds it.
        sent: All bytes of the worker.
    """

    def __init__(self, server: tuple[str, int], attack: Frames, kind: FrameKind = FrameKind.PAYLOAD) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.sent = bytearray()
        self._server, self._attack, self._kind = server, attack, kind
        self._seen: list[bytes] = []
        self._held: list[bytes] = []
        self._attacked = False
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._sockets: list[socket.socket] = [self.listener]
        self._threads[0].start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT)
        for each in self._sockets:
            each.close()

    def _run(self) -> None:
        worker, _ = self.listener.accept()  # one connection: the next call finds nobody
        server = socket.create_connection(self._server)
        self._sockets += [worker, server]
        self._threads.append(threading.Thread(target=self._back, args=(server, worker), daemon=True))
        self._threads[-1].start()
        stream = b""
        with contextlib.suppress(OSError):
            while data := worker.recv(1 << 16):
                self.sent += data
                frames, stream = cut(stream + data)
                for each in frames:
                    server.sendall(self._passed_on(each))

    def _passed_on(self, frame: bytes) -> bytes:
        """What to send now that this frame has come. Other frames stay between the data frames where they were."""
        if self._attacked or not (self._held or self._is_data(frame)):
            return frame
        self._held.append(frame)
        sent = [each for each in self._held if self._is_data(each)]
        if len(sent) < 3:
            return b""
        self._attacked = True
        made = iter(self._attack(sent, self._seen))
        in_order = [next(made, b"") if self._is_data(each) else each for each in self._held]
        return b"".join([*in_order, *made])

    def _is_data(self, frame: bytes) -> bool:
        return frame[5] == self._kind

    def _back(self, server: socket.socket, worker: socket.socket) -> None:
        stream = b""
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                worker.sendall(data)
                frames, stream = cut(stream + data)
                self._seen += [each for each in frames if self._is_data(each)]
