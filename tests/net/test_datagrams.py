"""Datagrams with a number and a tag: what does not carry them is as if it had not come."""

from __future__ import annotations

import random
import select
import socket

import numpy as np
import pytest

from gradwire.core.errors import OptionError
from gradwire.net.datagrams import (
    MAX_PACKET_BYTES,
    TRAILER_BYTES,
    WINDOW,
    Address,
    DatagramReceiver,
    DatagramSender,
    DatagramSocket,
)

KEY = bytes(range(32))
ANY = ("127.0.0.1", 0)
PACKET = np.arange(60, dtype=np.uint8)


@pytest.fixture
def sockets():
    made = []

    def make(**options) -> DatagramSocket:
        made.append(DatagramSocket(ANY, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait(end: DatagramSocket) -> None:
    assert select.select([end.socket], [], [], 10)[0]


def received(end: DatagramSocket, most: int = 64) -> list[tuple[Address, bytes]]:
    return [(source, bytes(datagram)) for source, datagram in end.receive(most)]


def datagram(sender: DatagramSender, packet: np.ndarray = PACKET) -> bytes:
    """A datagram as it is on the wire."""
    return packet.tobytes() + sender.trailer(packet)


def opened(receiver: DatagramReceiver, whole: bytes) -> bytes | None:
    packet = receiver.open(memoryview(whole))
    return None if packet is None else bytes(packet)


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_PACKET_BYTES])
def test_packets_arrive_as_they_were(sockets, size):
    packet = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    here, there, sender, receiver = sockets(), sockets(), DatagramSender(KEY), DatagramReceiver(KEY)
    for _ in range(2):
        here.send(packet, there.address, sender)
        wait(there)
        ((source, whole),) = received(there)
        assert source == here.address
        assert opened(receiver, whole) == packet.tobytes()
    assert received(there) == []
    assert receiver.forged == receiver.replayed == 0


def test_a_changed_datagram_is_dropped():
    receiver, good = DatagramReceiver(KEY), datagram(DatagramSender(KEY))
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        assert opened(receiver, bytes(damaged)) is None
    for length in range(len(good)):
        assert opened(receiver, good[:length]) is None
    assert receiver.forged == 9 * len(good)
    assert opened(receiver, good) == PACKET.tobytes()


def test_another_key_is_dropped():
    receiver = DatagramReceiver(KEY)
    assert opened(receiver, datagram(DatagramSender(bytes(32)))) is None
    assert (receiver.forged, receiver.replayed) == (1, 0)


def test_a_packet_that_is_sent_again_has_another_number():
    sender, receiver = DatagramSender(KEY), DatagramReceiver(KEY)
    first, second = datagram(sender), datagram(sender)
    assert first != second
    assert first[:-TRAILER_BYTES] == second[:-TRAILER_BYTES]
    assert opened(receiver, second) == opened(receiver, first) == PACKET.tobytes()


def test_each_number_is_taken_once_whatever_the_order():
    """Against a set of numbers, with jumps, repetitions and numbers too old to know."""
    sender, receiver, draw = DatagramSender(KEY), DatagramReceiver(KEY), random.Random(0)
    sent = [datagram(sender) for _ in range(3 * WINDOW)]
    seen: set[int] = set()
    highest, at = -1, 0
    for _ in range(4 * WINDOW):
        at = min(len(sent) - 1, at + draw.choice((0, 0, 1, 1, 2, 9)))
        number = max(0, at - draw.choice((0, 0, 1, 5, 100, WINDOW - 1, WINDOW, 2 * WINDOW)))
        new = number not in seen and number > highest - WINDOW
        assert (opened(receiver, sent[number]) is not None) == new
        seen.add(number)
        highest = max(highest, number)
    assert receiver.forged == 0
    assert receiver.replayed > WINDOW


def test_an_old_number_costs_no_memory():
    """One bit for each number since would be 2^60 bits."""
    sender, receiver = DatagramSender(KEY), DatagramReceiver(KEY)
    old = datagram(sender)
    receiver._next = 1 << 60
    assert opened(receiver, old) is None
    assert receiver.replayed == 1


def test_a_forged_number_does_not_move_the_window():
    sender, receiver = DatagramSender(KEY), DatagramReceiver(KEY)
    good = datagram(sender)
    forged = good[: len(PACKET)] + (1 << 60).to_bytes(8, "little") + good[-16:]
    assert opened(receiver, forged) is None
    assert opened(receiver, good) is not None


def test_a_flood_is_looked_at_a_bounded_number_at_a_time(sockets):
    there = sockets()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        for _ in range(10):
            plain.sendto(bytes(60), there.address)
        for expected in (4, 4, 2):
            wait(there)
            assert len(received(there, 4)) == expected


def test_multicast_is_for_ipv4(sockets):
    with pytest.raises(OptionError, match="239"):
        sockets().join("ff02::1", "127.0.0.1")
