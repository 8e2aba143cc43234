"""The kernel's program under the schedules of faults: each packet goes to it and to the oracle, and they must agree.

The program runs on each packet by a test run of the kernel, with real maps. What it passes on goes to a state machine
of Python's, as on a server.
"""
# Shapes: W = workers

from __future__ import annotations

import functools
import struct
from dataclasses import fields

import google_crc32c
import numpy as np

from gradwire.aggregator.packet import (
    PACKET_HEADER_BYTES,
    SERVER,
    PacketCounters,
    PacketKey,
    PacketKind,
    field,
    pack,
    unpack,
)
from gradwire.aggregator.server import EVERYONE, AggregatorStateMachine, PacketToSend
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp.guard import SipHashGuard
from gradwire.aggregator.xdp.kernel_slots import KernelSlots
from gradwire.aggregator.xdp.layout import ANSWER
from gradwire.aggregator.xdp.program import DROP, PASS, SEND_BACK
from gradwire.aggregator.xdp.system import run_program
from gradwire.core.errors import FrameError

PORT = 7071
SERVER_HOST, SERVER_KEY = bytes([10, 77, 0, 1]), bytes(range(100, 116))
_CHECKSUM = field("checksum")


def kernel_config(world_size: int, **options: object) -> SessionConfig:
    """Sums of 8 bits, if they fit, and of 16, with last packets that Python adds up, and a maximum.

    Packets have 1,024 elements; where the number of workers is even, no packet is longer than an Ethernet frame.
    """
    narrow = IndexTable(4, tuple(range(16)), 8 if 15 * world_size < 256 else 16)
    wide = IndexTable(4, (0, 1, 3, 7, 20, 50, 90, 100, 130, 150, 180, 200, 500, 700, 900, 1023), 16)
    streams = Stream(Operation.SUM, 1100, 0), Stream(Operation.SUM, 2048, 1), Stream(Operation.MAXIMUM, 3)
    mtu = 0 if world_size % 2 else 1500
    return SessionConfig(world_size, (narrow, wide), streams, 1024, **{"mtu": mtu, **options})


def worker_key(worker: int) -> bytes:
    return bytes([worker + 1]) * 16


def host_of(worker: int) -> bytes:
    return bytes([10, 77, 1, worker + 1])


def framed(packet: bytes, worker: int, port: int = PORT) -> bytes:
    """Return a packet of a worker as an Ethernet frame."""
    udp = struct.pack(">HHHH", 5000 + worker, port, 8 + len(packet), 0)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(packet), 7, 0x4000, 64, 17, 0) + host_of(worker) + SERVER_HOST
    return b"\2\0\0\0\0\0" + b"\2\0\0\0\1" + bytes([worker]) + b"\x08\x00" + ip + udp + packet


def ip_checksum(header: bytes) -> int:
    """Return the checksum of an IP header, 0 if it holds its own."""
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


@functools.lru_cache(maxsize=64)
def slots_of(config: SessionConfig, guard_name: str) -> KernelSlots:
    """Maps and program of a configuration, used again by every schedule with the same."""
    made = KernelSlots(config, guard_name, PORT)
    for worker in range(config.world_size):
        made.join(worker, (".".join(map(str, host_of(worker))), 5000 + worker), worker_key(worker))
    return made


class KernelAggregator:
    """A server whose sums are formed in the kernel, with an oracle that gets the same packets.

    It stands in for `AggregatorStateMachine`.

    Args:
        config: Session configuration.
        epoch: Incarnation of the server.
        guard_name: Name of the guard.
    """

    def __init__(self, config: SessionConfig, epoch: int, guard_name: str = "crc32c") -> None:
        self.config, self.epoch = config, epoch
        self.slots = slots_of(config, guard_name)
        self.slots.begin(epoch, SERVER_KEY)
        self.guard = self.slots.layout.guard
        self.rest, self.oracle = AggregatorStateMachine(config, epoch), AggregatorStateMachine(config, epoch)
        self._resumed = False

    @property
    def resumed(self) -> bool:
        return self._resumed

    @resumed.setter
    def resumed(self, value: bool) -> None:
        assert value, "a server is resumed once"
        self._resumed = self.rest.resumed = self.oracle.resumed = True
        self.slots.resume()

    @property
    def counters(self) -> PacketCounters:
        """Counts of program and Python together."""
        return _sum(self.slots.counted(), self.rest.counters)

    def receive(self, datagram: bytes, now: float) -> list[PacketToSend]:
        found = self._found(datagram, now)
        expected = self._messages(self.oracle, datagram, now)
        assert _apart(self.config, found) == _apart(self.config, expected)
        return found

    def flush(self) -> list[PacketToSend]:
        return []

    def check_counters(self) -> None:
        """Compare what has happened to packets with the oracle's counts."""
        found, expected = vars(self.counters).copy(), vars(self.oracle.counters).copy()
        for counts in (found, expected):  # a damaged packet is forged where there is a tag
            counts["corrupt"] += counts.pop("forged")
        assert found == expected

    def _found(self, datagram: bytes, now: float) -> list[PacketToSend]:
        worker = struct.unpack_from("<H", datagram.ljust(64), field("worker").offset)[0]
        if isinstance(self.guard, SipHashGuard) and not _is_whole(datagram):
            sealed = datagram + bytes(8)
        else:
            sealed = self.guard.sealed(datagram, worker_key(worker % 255))
        frame = framed(sealed, worker % self.config.world_size)
        verdict, left, answer = run_program(self.slots.program, frame)
        if verdict == DROP:
            return []
        if verdict == SEND_BACK:
            return [self._sent_back(left, worker)]
        assert verdict == PASS and left == frame, "what passes is as it came"
        return self._copies(datagram, answer) if answer else self._messages(self.rest, datagram, now)

    def _messages(self, machine: AggregatorStateMachine, datagram: bytes, now: float) -> list[PacketToSend]:
        try:
            made = machine.receive(datagram, now)
        except FrameError:
            made = []
        return made + machine.flush()

    def _sent_back(self, frame: bytes, worker: int) -> PacketToSend:
        assert frame[:6] == b"\2\0\0\0\1" + bytes([worker]) and frame[30:34] == host_of(worker)
        assert ip_checksum(frame[14:34]) == 0
        assert struct.unpack(">HHHH", frame[34:42]) == (PORT, 5000 + worker, len(frame) - 34, 0)
        assert struct.unpack(">H", frame[16:18])[0] == len(frame) - 14
        return PacketToSend(worker, self._opened(frame[42:]))

    def _opened(self, sealed: bytes) -> np.ndarray:
        """Return a packet of the server's with its checksum, once its guard holds."""
        packet = sealed[: len(sealed) - self.guard.trailer_bytes]
        assert self.guard.sealed(packet, SERVER_KEY) == sealed
        opened = np.frombuffer(packet, np.uint8).copy()
        if self.guard.trailer_bytes:
            assert not opened[_CHECKSUM.offset :][:4].any()
            opened = _with_checksum(opened)
        unpack(opened)
        return opened

    def _copies(self, datagram: bytes, answer: bytes) -> list[PacketToSend]:
        results, wanted, round_, slot, buffer, kind, marker = ANSWER.unpack(answer)
        key = unpack(datagram).key
        assert marker == 1
        made = []
        if results:
            packet = self._opened(self.slots.result(slot, buffer))
            made += [PacketToSend(worker, packet) for worker in _workers(results)]
        for worker in _workers(wanted):
            packet = pack(PacketKind.WANTED, key._replace(round=round_), SERVER, self.epoch)
            made.append(PacketToSend(worker, packet))
        if kind == PacketKind.HELD:
            body = struct.pack("<QII", *key)
            sender = unpack(datagram).worker
            made.append(PacketToSend(sender, pack(PacketKind.HELD, PacketKey(0, 0, 0), SERVER, self.epoch, body)))
        assert kind in (0, PacketKind.HELD)
        return made


def _with_checksum(packet: np.ndarray) -> np.ndarray:
    filled = packet.copy()
    filled[_CHECKSUM.offset : _CHECKSUM.offset + 4] = 0
    filled[_CHECKSUM.offset : _CHECKSUM.offset + 4].view("<u4")[0] = google_crc32c.value(filled)
    return filled


def _is_whole(datagram: bytes) -> bool:
    try:
        unpack(datagram)
    except FrameError:
        return False
    return True


def _apart(config: SessionConfig, messages: list[PacketToSend]) -> list[tuple[int, bytes]]:
    """Return who gets which bytes, in an order of its own."""
    everyone = range(config.world_size)
    return sorted(
        (worker, bytes(message.packet))
        for message in messages
        for worker in (everyone if message.worker == EVERYONE else [message.worker])
    )


def _workers(bitmap: int) -> list[int]:
    return [worker for worker in range(bitmap.bit_length()) if bitmap >> worker & 1]


def _sum(*counters: PacketCounters) -> PacketCounters:
    return PacketCounters(
        **{each.name: sum(getattr(count, each.name) for count in counters) for each in fields(PacketCounters)}
    )


assert PACKET_HEADER_BYTES == 44, "frames are cut by hand here"
