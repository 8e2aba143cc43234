"""How a packet proves that it is whole, and whose it is: emitted into the programs, and the same for Python's ends.

One of two, always. `SipHashGuard` puts a number of 8 bytes behind each packet, and a tag of 8 bytes over both, with a
key for each worker and direction. `ChecksumGuard` is the CRC-32C in the header: it finds faults, and stops nobody who
wants to write packets, so the operator must say that the network is trusted.

Under `SipHashGuard` the checksum in the header counts for nothing, and a program writes 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, field
from gradwire.aggregator.xdp import siphash
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.net.datagrams import NUMBER_BYTES

_CHECKSUM = field("checksum")
_POLYNOMIAL = 0x82F63B78
_MASK = 0xFFFFFFFF
TABLE_BYTES = 8 * 256 * 4


class Guard(ABC):
    """What both ends do to a packet before they send it, and after they have received it.

    Lengths are constants of a program, in bytes, and multiples of 4.

    Attributes:
        trailer_bytes: Bytes behind a packet.
    """

    trailer_bytes: int

    @abstractmethod
    def verify(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], table: Register
    ) -> Register:
        """Append the check of a packet, and return whether it holds."""

    @abstractmethod
    def seal(self, code: Assembler, packet: Register, length: int, table: Register) -> None:
        """Append the writing of what is the same for every receiver. The checksum in the header is 0."""

    @abstractmethod
    def sign(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], number: Register
    ) -> None:
        """Append the writing of what is for one receiver, behind a sealed packet."""


class ChecksumGuard(Guard):
    """CRC-32C of the packet, in its header."""

    trailer_bytes = 0

    def verify(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], table: Register
    ) -> Register:
        declared = code.load(packet, *_CHECKSUM)
        return self._checksum(code, packet, length, table).equals(declared)

    def seal(self, code: Assembler, packet: Register, length: int, table: Register) -> None:
        code.store(packet, _CHECKSUM.offset, self._checksum(code, packet, length, table), _CHECKSUM.num_bytes)

    def sign(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], number: Register
    ) -> None:
        pass

    def _checksum(self, code: Assembler, packet: Register, length: int, table: Register) -> Register:
        """CRC-32C with the field of the checksum as 0, eight bytes at a time."""
        before = _CHECKSUM.offset  # a multiple of 8: the field begins a word
        with code.loop(before // 8, _MASK) as head:
            head.carry(self._word(code, head.carried[0], code.load(packet.at(head.index * 8)), table))
        crc = head.results[0]
        rest = length - before
        if rest < 8:
            return self._half(code, crc, code.number(0), table) ^ _MASK
        crc = self._word(code, crc, code.load(packet, before) & (_MASK << 32), table)
        if rest // 8 > 1:
            with code.loop(rest // 8 - 1, crc) as body:
                word = code.load(packet.at(before + 8).at(body.index * 8))
                body.carry(self._word(code, body.carried[0], word, table))
            crc = body.results[0]
        if rest % 8:
            crc = self._half(code, crc, code.load(packet, length - 4, 4), table)
        return crc ^ _MASK

    def _word(self, code: Assembler, crc: Register, word: Register, table: Register) -> Register:
        return self._bytes(code, crc ^ word, 8, table)

    def _half(self, code: Assembler, crc: Register, word: Register, table: Register) -> Register:
        return self._bytes(code, crc ^ word, 4, table)

    def _bytes(self, code: Assembler, mixed: Register, count: int, table: Register) -> Register:
        """Look `count` bytes up, each in the table of its distance from the last one."""
        found = None
        for place in range(count):
            byte = (mixed >> (8 * place)) & 0xFF
            entry = code.load(table.at((count - 1 - place) * 1024).at(byte << 2), 0, 4)
            found = entry if found is None else found ^ entry
        assert found is not None, "there is at least one byte"
        return found


class SipHashGuard(Guard):
    """A number, and SipHash-2-4 of packet and number, behind the packet."""

    trailer_bytes = NUMBER_BYTES + siphash.TAG_BYTES

    def verify(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], table: Register
    ) -> Register:
        tagged = length + NUMBER_BYTES
        return self._tag(code, packet, tagged, key).equals(code.load(packet, tagged))

    def seal(self, code: Assembler, packet: Register, length: int, table: Register) -> None:
        pass

    def sign(
        self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register], number: Register
    ) -> None:
        tagged = length + NUMBER_BYTES
        code.store(packet, length, number)
        code.store(packet, tagged, self._tag(code, packet, tagged, key))

    def _tag(self, code: Assembler, packet: Register, length: int, key: tuple[Register, Register]) -> Register:
        start = [key[place % 2] ^ word for place, word in enumerate(siphash.WORDS)]
        with code.loop(length // 8, *start) as loop:
            loop.carry(*self._take(loop.carried, code.load(packet.at(loop.index * 8))))
        last = code.number((length & 0xFF) << 56)
        if length % 8:
            last = code.load(packet, length - 4, 4) | last
        state = self._take(loop.results, last)
        state = [state[0], state[1], state[2] ^ siphash.LAST, state[3]]
        for _ in range(siphash.LAST_ROUNDS):
            state = self._mix(*state)
        return state[0] ^ state[1] ^ state[2] ^ state[3]

    def _take(self, state: list[Register], word: Register) -> list[Register]:
        state = [state[0], state[1], state[2], state[3] ^ word]
        for _ in range(siphash.ROUNDS):
            state = self._mix(*state)
        return [state[0] ^ word, state[1], state[2], state[3]]

    def _mix(self, v0: Register, v1: Register, v2: Register, v3: Register) -> list[Register]:
        v0 = v0 + v1
        v1 = _turn(v1, 13) ^ v0
        v0 = _turn(v0, 32)
        v2 = v2 + v3
        v3 = _turn(v3, 16) ^ v2
        v0 = v0 + v3
        v3 = _turn(v3, 21) ^ v0
        v2 = v2 + v1
        v1 = _turn(v1, 17) ^ v2
        return [v0, v1, _turn(v2, 32), v3]


GUARDS: dict[str, type[Guard]] = {"siphash": SipHashGuard, "crc32c": ChecksumGuard}
"""Guards by the name that the command line uses."""


def checksum_tables() -> bytes:
    """Return the tables of CRC-32C for eight bytes at a time, uint32[8, 256]: the table of k is of k bytes later."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ np.uint32(_POLYNOMIAL), first >> 1)
    tables = [first]
    for _ in range(7):
        tables.append(first[tables[-1] & 0xFF] ^ tables[-1] >> 8)
    return np.stack(tables).astype("<u4").tobytes()


def _turn(value: Register, bits: int) -> Register:
    return (value << bits) | (value >> (64 - bits))


assert PACKET_HEADER_BYTES % 4 == 0 and _CHECKSUM.offset % 8 == 0, "programs read packets by words"
