"""The kernel's program under the schedules of faults: each packet goes to it and to the oracle, and they must agree.

The program runs on each packet by a test run of the kernel, with real maps. What it passes on goes to a state machine
of Python's, as on a server. Packets travel sealed; a restarted server has other keys.
"""
# Shapes: W = workers

from __future__ import annotations

import contextlib
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
from gradwire.aggregator.xdp import seals
from gradwire.aggregator.xdp.kernel_slots import KernelSlots
from gradwire.aggregator.xdp.layout import ANSWER
from gradwire.aggregator.xdp.program import DROP, PASS, SEND_BACK
from gradwire.aggregator.xdp.seals import Keys
from gradwire.aggregator.xdp.system import run_program
from gradwire.core.errors import FrameError
from gradwire.net.datagrams import DatagramReceiver

PORT = 7071
SERVER_HOST = bytes([10, 77, 0, 1])
_WORKER, _CHECKSUM = field("worker"), field("checksum")


def kernel_config(world_size: int, **options: object) -> SessionConfig:
    """Sums of 8 bits, if they fit, and of 16, with last packets that Python adds up, and a maximum.

    Packets have 1,024 elements; where the number of workers is even, no packet is longer than an Ethernet frame.
    """
    narrow = IndexTable(4, tuple(range(16)), 8 if 15 * world_size < 256 else 16)
    wide = IndexTable(4, (0, 1, 3, 7, 20, 50, 90, 100, 130, 150, 180, 200, 500, 700, 900, 1023), 16)
    streams = Stream(Operation.SUM, 1100, 0), Stream(Operation.SUM, 2048, 1), Stream(Operation.MAXIMUM, 3)
    mtu = 0 if world_size % 2 else 1500
    return SessionConfig(world_size, (narrow, wide), streams, 1024, **{"mtu": mtu, **options})


def keys_of(worker: int, epoch: int) -> Keys:
    return Keys(*(struct.pack("<QII", epoch, worker, direction) for direction in (1, 2)))


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
def _slots_of(config: SessionConfig, guard_name: str) -> KernelSlots:
    """Maps and program of a configuration, used again by every schedule with the same."""
    return KernelSlots(config, guard_name, PORT)


def begun(config: SessionConfig, guard_name: str, epoch: int) -> KernelSlots:
    """Return maps and program of a configuration, with nothing heard yet, and all workers joined."""
    slots = _slots_of(config, guard_name)
    slots.begin(epoch)
    for worker in range(config.world_size):
        slots.join(worker, (".".join(map(str, host_of(worker))), 5000 + worker), *keys_of(worker, epoch))
    return slots


class Sealer:
    """What workers put behind their packets, and what they take of the server's.

    Args:
        world_size: Number of workers W.
        guard_name: Name of the guard.
        epoch: Incarnation of the server.
    """

    def __init__(self, world_size: int, guard_name: str, epoch: int) -> None:
        keys = [keys_of(worker, epoch) for worker in range(world_size)]
        self._workers = [seals.ends(guard_name, *each) for each in keys]
        self._servers = [seals.ends(guard_name, *reversed(each))[1] for each in keys]

    def sealed(self, worker: int, packet: bytes | np.ndarray) -> bytes:
        """Return a packet of a worker as it travels, with the next number."""
        return bytes(packet) + self._workers[worker][0].trailer(np.frombuffer(packet, np.uint8))

    def opened(self, worker: int, datagram: bytes) -> bytes | None:
        """Return a packet that a worker takes from the server."""
        return _packet_in(self._workers[worker][1], datagram)

    def opened_by_server(self, worker: int, datagram: bytes) -> bytes | None:
        """Return a packet that the server takes from a worker."""
        return _packet_in(self._servers[worker], datagram)

    @property
    def dropped(self) -> PacketCounters:
        """Datagrams that the server has not taken."""
        return PacketCounters(
            forged=sum(each.forged for each in self._servers), replayed=sum(each.replayed for each in self._servers)
        )


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
        self.slots = begun(config, guard_name, epoch)
        self.rest, self.oracle = AggregatorStateMachine(config, epoch), AggregatorStateMachine(config, epoch)
        self._of_rest, self._of_oracle = (Sealer(config.world_size, guard_name, epoch) for _ in range(2))
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
        return _sum(self.slots.counted(), self.rest.counters, self._of_rest.dropped)

    def sealed(self, worker: int, packet: np.ndarray) -> bytes:
        return self._of_oracle.sealed(worker, packet)

    def receive(self, datagram: bytes, now: float) -> list[PacketToSend]:
        named = int.from_bytes(datagram[_WORKER.offset :][: _WORKER.num_bytes], "little")
        source = named % self.config.world_size
        expected = self._messages(self.oracle, self._of_oracle.opened_by_server(source, datagram), now)
        found = self._found(datagram, source, now)
        assert _apart(self.config, found) == _apart(self.config, expected)
        return found

    def flush(self) -> list[PacketToSend]:
        return []

    def check_counters(self) -> None:
        """Compare what has happened to packets with the oracle's counts."""
        assert self.counters == _sum(self.oracle.counters, self._of_oracle.dropped)

    def _found(self, datagram: bytes, source: int, now: float) -> list[PacketToSend]:
        frame = framed(datagram, source)
        verdict, left, answer = run_program(self.slots.program, frame)
        if verdict == DROP:
            return []
        if verdict == SEND_BACK:
            return [self._sent_back(left, source)]
        assert verdict == PASS and left == frame, "what passes is as it came"
        if answer:
            return self._copies(datagram, source, answer)
        return self._messages(self.rest, self._of_rest.opened_by_server(source, datagram), now)

    def _messages(self, machine: AggregatorStateMachine, packet: bytes | None, now: float) -> list[PacketToSend]:
        made = []
        if packet is not None:
            with contextlib.suppress(FrameError):
                made = machine.receive(packet, now)
        return made + machine.flush()

    def _sent_back(self, frame: bytes, worker: int) -> PacketToSend:
        assert frame[:6] == b"\2\0\0\0\1" + bytes([worker]) and frame[30:34] == host_of(worker)
        assert ip_checksum(frame[14:34]) == 0
        assert struct.unpack(">HHHH", frame[34:42]) == (PORT, 5000 + worker, len(frame) - 34, 0)
        assert struct.unpack(">H", frame[16:18])[0] == len(frame) - 14
        packet = self._of_rest.opened(worker, frame[42:])
        assert packet is not None, "each answer has a new number, and the tag of its worker"
        unpack(packet)
        return PacketToSend(worker, np.frombuffer(packet, np.uint8))

    def _copies(self, datagram: bytes, source: int, answer: bytes) -> list[PacketToSend]:
        results, wanted, round_, slot, buffer, kind, marker = ANSWER.unpack(answer)
        trailer_bytes = self.slots.layout.guard.trailer_bytes
        key = unpack(self._with_checksum(datagram[: len(datagram) - trailer_bytes])).key
        assert marker == 1
        made = []
        if results:
            packet = self._with_checksum(self.slots.result(slot, buffer))
            unpack(packet)
            made += [PacketToSend(worker, packet) for worker in _workers(results)]
        for worker in _workers(wanted):
            packet = pack(PacketKind.WANTED, key._replace(round=round_), SERVER, self.epoch)
            made.append(PacketToSend(worker, packet))
        if kind == PacketKind.HELD:
            body = struct.pack("<QII", *key)
            made.append(PacketToSend(source, pack(PacketKind.HELD, PacketKey(0, 0, 0), SERVER, self.epoch, body)))
        assert kind in (0, PacketKind.HELD)
        return made

    def _with_checksum(self, packet: bytes) -> np.ndarray:
        """Return a packet with the checksum, which a program leaves out where there are tags."""
        found = np.frombuffer(packet, np.uint8).copy()
        if self.slots.layout.guard.trailer_bytes:
            checksum = found[_CHECKSUM.offset :][: _CHECKSUM.num_bytes]
            checksum[:] = 0
            checksum[:] = np.frombuffer(google_crc32c.value(found).to_bytes(4, "little"), np.uint8)
        return found


def _packet_in(receiver: DatagramReceiver, datagram: bytes) -> bytes | None:
    packet = receiver.open(memoryview(bytearray(datagram)))
    return None if packet is None else bytes(packet)


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
