"""Ethernet, IPv4 and UDP headers, and packets without sums, as both programs read and write them."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.aggregator.packet import (
    MAGIC,
    PACKET_HEADER_BYTES,
    SERVER,
    VERSION,
    PacketKind,
    field,
)
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.layout import LINK_AT, NUMBER_AT, SENT_KEY_AT, Layout

ETHERNET_BYTES, IP_BYTES, UDP_BYTES = 14, 20, 8
HEADER_BYTES = ETHERNET_BYTES + IP_BYTES + UDP_BYTES
IP_AT, UDP_AT = ETHERNET_BYTES, ETHERNET_BYTES + IP_BYTES
KEY_BYTES = 16
"""Bytes of a packet's key in the body of a HELD packet."""
_ETHERTYPE_IPV4, _FIRST_BYTE, _UDP, _TIME_TO_LIVE = 0x0008, 0x45, 17, 64
_FRAGMENT = 0xFF3F  # more fragments, or an offset, as loaded little-endian


class Control(NamedTuple):
    """A packet of the server's without sums.

    Attributes:
        kind: HELD, WANTED or OBSOLETE.
        round: Round that it is about.
        stream: Index of the stream.
        packet: Index of the packet.
        epoch: Incarnation of the server.
    """

    kind: Register | int
    round: Register
    stream: Register
    packet: Register
    epoch: Register


def put(code: Assembler, packet: Register, name: str, value: Register | int) -> None:
    """Write a field of a packet's header."""
    place = field(name)
    code.store(packet, place.offset, value, place.num_bytes)


def get(code: Assembler, packet: Register, name: str) -> Register:
    """Return a field of a packet's header."""
    return code.load(packet, *field(name))


def is_ours(code: Assembler, frame: Register, port: int) -> Register:
    """Return whether a frame is a whole UDP datagram over IPv4 without options, to a port."""
    parts = (
        code.load(frame, 12, 2) ^ _ETHERTYPE_IPV4,
        code.load(frame, IP_AT, 1) ^ _FIRST_BYTE,
        code.load(frame, IP_AT + 6, 2) & _FRAGMENT,
        code.load(frame, IP_AT + 9, 1) ^ _UDP,
        code.load(frame, UDP_AT + 2, 2) ^ int.from_bytes(port.to_bytes(2, "big"), "little"),
        get(code, frame.at(HEADER_BYTES), "magic") ^ int.from_bytes(MAGIC, "little"),
    )
    differing = parts[0]
    for part in parts[1:]:
        differing = differing | part
    return differing.equals(0)


def write_start(code: Assembler, packet: Register, kind: Register | int, epoch: Register, length: int) -> None:
    """Write the fields of a header that any packet of the server's has."""
    put(code, packet, "magic", int.from_bytes(MAGIC, "little"))
    put(code, packet, "version", VERSION)
    put(code, packet, "kind", kind)
    put(code, packet, "flags", 0)
    put(code, packet, "epoch", epoch)
    put(code, packet, "worker", SERVER)
    put(code, packet, "count", 0)
    put(code, packet, "length", length)
    put(code, packet, "checksum", 0)


def write_key(code: Assembler, packet: Register, control: Control) -> None:
    """Write the fields of a header that say which contribution it is about."""
    put(code, packet, "round", control.round)
    put(code, packet, "stream", control.stream)
    put(code, packet, "packet", control.packet)


def write_control(code: Assembler, layout: Layout, packet: Register, control: Control, table: Register) -> None:
    """Write and seal a packet without body."""
    write_start(code, packet, control.kind, control.epoch, 0)
    write_key(code, packet, control)
    layout.guard.seal(code, packet, PACKET_HEADER_BYTES, table)


def write_held(code: Assembler, layout: Layout, packet: Register, control: Control, table: Register) -> None:
    """Write and seal the word that a contribution has arrived: a body of one key."""
    write_start(code, packet, PacketKind.HELD, control.epoch, KEY_BYTES)
    for name in ("round", "stream", "packet"):
        put(code, packet, name, 0)
    body = packet.at(PACKET_HEADER_BYTES)
    code.store(body, 0, control.round)
    code.store(body, 8, control.stream, 4)
    code.store(body, 12, control.packet, 4)
    layout.guard.seal(code, packet, PACKET_HEADER_BYTES + KEY_BYTES, table)


def sign(code: Assembler, layout: Layout, packet: Register, length: int, record: Register) -> None:
    """Put the next number to a worker behind a sealed packet, and the tag by its key. `record` is a `WORKER`."""
    if layout.guard.trailer_bytes:
        key = code.load(record, SENT_KEY_AT), code.load(record, SENT_KEY_AT + 8)
        layout.guard.sign(code, packet, length, key, code.draw(record, NUMBER_AT))


def return_to_sender(code: Assembler, frame: Register, packet_bytes: int) -> None:
    """Turn the headers of a frame around, for a packet of another length."""
    to, low, high = code.load(frame, 0, 4), code.load(frame, 6, 4), code.load(frame, 10, 2)
    to_high = code.load(frame, 4, 2)
    for offset, value, num_bytes in ((0, low, 4), (4, high, 2), (6, to, 4), (10, to_high, 2)):
        code.store(frame, offset, value, num_bytes)
    source, destination = code.load(frame, IP_AT + 12, 4), code.load(frame, IP_AT + 16, 4)
    ports = code.load(frame, UDP_AT, 4)
    write_lengths(code, frame, packet_bytes)
    write_addresses(code, frame, destination, source)
    code.store(frame, UDP_AT, ports << 16 | ports >> 16, 4)


def server_in(code: Assembler, frame: Register) -> tuple[Register, Register, Register]:
    """Return where a frame of a worker is addressed to: the link-layer address in two parts, and the host."""
    return code.load(frame, 0, 4), code.load(frame, 4, 2), code.load(frame, IP_AT + 16, 4)


def address_to(
    code: Assembler, frame: Register, port: int, server: tuple[Register, Register, Register], record: Register
) -> None:
    """Address a frame of the server's to a worker. `record` is a `WORKER`."""
    low, high, source = server
    code.store(frame, 0, code.load(record, LINK_AT, 4), 4)
    code.store(frame, 4, code.load(record, LINK_AT + 4, 2), 2)
    code.store(frame, 6, low, 4)
    code.store(frame, 10, high, 2)
    code.store(frame, UDP_AT, _big_endian(port), 2)
    code.store(frame, UDP_AT + 2, code.load(record, 4, 2), 2)
    write_addresses(code, frame, source, code.load(record, 0, 4))


def write_lengths(code: Assembler, frame: Register, packet_bytes: int) -> None:
    """Write lengths and what else does not depend on the receiver. A UDP checksum of 0 is none; the guard is better."""
    code.store(frame, IP_AT + 2, _big_endian(IP_BYTES + UDP_BYTES + packet_bytes), 2)
    code.store(frame, IP_AT + 4, 0, 4)
    code.store(frame, IP_AT + 8, _TIME_TO_LIVE | _UDP << 8, 2)
    code.store(frame, UDP_AT + 4, _big_endian(UDP_BYTES + packet_bytes), 2)
    code.store(frame, UDP_AT + 6, 0, 2)


def write_addresses(code: Assembler, frame: Register, source: Register, destination: Register) -> None:
    """Write the addresses, and the checksum over the IP header."""
    code.store(frame, IP_AT + 12, source, 4)
    code.store(frame, IP_AT + 16, destination, 4)
    code.store(frame, IP_AT + 10, 0, 2)
    total = code.load(frame, IP_AT, 2)
    for offset in range(2, IP_BYTES, 2):
        total = total + code.load(frame, IP_AT + offset, 2)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    code.store(frame, IP_AT + 10, total ^ 0xFFFF, 2)


def _big_endian(value: int) -> int:
    return int.from_bytes(value.to_bytes(2, "big"), "little")
