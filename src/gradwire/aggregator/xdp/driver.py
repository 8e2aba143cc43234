"""What a driver says of XDP, by the family "netdev" of generic netlink, with as much of its format as that takes."""

from __future__ import annotations

import socket
import struct

_GENERIC = _CONTROL = 16  # the protocol, and its family that knows the families
_GET_FAMILY, _FAMILY, _NAME = 3, 1, 2
_GET_DEVICE, _INDEX, _FEATURES = 1, 1, 3
_HEADER = struct.Struct("<IHHIIBBH")
_ATTRIBUTE = struct.Struct("<HH")
_REQUEST = 1
_SENDS_REDIRECTED = 1 << 2
_ANSWER_BYTES = 1 << 16
_ANSWER_SECONDS = 5.0


def sends_redirected(interface: int) -> bool:
    """Return whether the driver of the interface with this index sends what XDP programs redirect to it.

    False if the kernel does not say: before Linux 6.3 it has no such family.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _GENERIC) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        family = _ask(kernel, _CONTROL, _GET_FAMILY, _NAME, b"netdev\0").get(_FAMILY)
        if family is None:
            return False
        found = _ask(kernel, int.from_bytes(family, "little"), _GET_DEVICE, _INDEX, struct.pack("<I", interface))
    return bool(int.from_bytes(found.get(_FEATURES, b""), "little") & _SENDS_REDIRECTED)


def _ask(kernel: socket.socket, family: int, command: int, attribute: int, value: bytes) -> dict[int, bytes]:
    """Ask about one thing, and return the attributes of the answer.

    None that is asked for if there is an error, and none at all if there is no answer.
    """
    length = _ATTRIBUTE.size + len(value)
    padded = _ATTRIBUTE.pack(length, attribute) + value + bytes(-length % 4)
    kernel.send(_HEADER.pack(_HEADER.size + len(padded), family, _REQUEST, 1, 0, command, 1, 0) + padded)
    try:
        rest, found = kernel.recv(_ANSWER_BYTES)[_HEADER.size :], {}
    except TimeoutError:
        return {}
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[max(_ATTRIBUTE.size, length + -length % 4) :]
    return found
