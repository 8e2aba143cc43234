"""Many datagrams by one system call, for load that Python does not limit. Linux only."""
# Shapes: N = datagrams of a batch, B = bytes of the longest

from __future__ import annotations

import ctypes
import socket

import numpy as np

_SEGMENT = 103  # UDP_SEGMENT


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p), ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_Vector)), ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t), ("flags", ctypes.c_int),
    )  # fmt: skip


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint32))


class DatagramBatch:
    """Room for datagrams of a connected socket.

    Args:
        own: The socket.
        most: Number of datagrams N.
        num_bytes: Bytes of each, B: those that are sent, or the most that are received.

    Attributes:
        data: The datagrams, uint8[N, B].
    """

    def __init__(self, own: socket.socket, most: int, num_bytes: int) -> None:
        self.data = np.zeros((most, num_bytes), np.uint8)
        self._library = ctypes.CDLL(None, use_errno=True)
        self._socket = own
        self._vectors = (_Vector * most)(*((row.ctypes.data, num_bytes) for row in self.data))
        self._messages = (_Message * most)()
        for message, vector in zip(self._messages, self._vectors):
            message.header.vectors, message.header.num_vectors = ctypes.pointer(vector), 1

    def send(self, first: int, count: int) -> None:
        """Send some of the datagrams, which the kernel cuts apart behind the socket (`UDP_SEGMENT`).

        Raises:
            OSError: The kernel refused them.
        """
        self._socket.setsockopt(socket.IPPROTO_UDP, _SEGMENT, self.data.shape[1])
        self._socket.send(self.data[first : first + count].data)

    def receive(self) -> int:
        """Receive what has arrived, and return how many datagrams that is. Never waits."""
        most, flags = len(self._messages), socket.MSG_DONTWAIT
        return max(0, self._library.recvmmsg(self._socket.fileno(), self._messages, most, flags, None))

    def received(self, place: int) -> bytearray:
        """Return one of the datagrams that have been received."""
        return bytearray(self.data[place, : self._messages[place].length])
