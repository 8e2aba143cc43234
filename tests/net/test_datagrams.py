"""Datagrams with a keyed tag: what does not carry it is as if it had not come."""

from __future__ import annotations

import select
import socket

import numpy as np
import pytest

from gradwire.core.errors import OptionError
from gradwire.net.datagrams import MAX_PACKET_BYTES, DatagramSocket
from gradwire.net.handshake import JobKey

KEY = JobKey(bytes(range(32)))
ANY = ("127.0.0.1", 0)


@pytest.fixture
def sockets():
    made = []

    def make(key: JobKey = KEY, epoch: int = 5, **options) -> DatagramSocket:
        made.append(DatagramSocket(ANY, key, **options))
        made[-1].enter(epoch)
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait(end: DatagramSocket) -> None:
    assert select.select([end.socket], [], [], 10)[0]


def received(end: DatagramSocket, most: int = 64) -> list[bytes]:
    return [bytes(packet) for packet in end.receive(most)]


def recorded(sockets, packet: np.ndarray) -> bytes:
    """A datagram as it is on the wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.bind(ANY)
        sockets().send(packet, [plain.getsockname()])
        return plain.recv(1 << 16)


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_PACKET_BYTES])
def test_packets_arrive_as_they_were(sockets, size):
    packet = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    here, there = sockets(), sockets()
    here.send(packet, [there.address, there.address])
    for _ in range(2):
        wait(there)
        assert received(there, 1) == [packet.tobytes()]
    assert received(there) == []
    assert there.forged == 0


def test_a_changed_datagram_is_dropped(sockets):
    there, datagram = sockets(), recorded(sockets, np.arange(60, dtype=np.uint8))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        for bit in range(8 * len(datagram)):
            damaged = bytearray(datagram)
            damaged[bit // 8] ^= 1 << bit % 8
            plain.sendto(damaged, there.address)
            wait(there)
            assert received(there) == []
        for length in range(len(datagram)):
            plain.sendto(datagram[:length], there.address)
            wait(there)
            assert received(there) == []
        assert there.forged == 9 * len(datagram)
        plain.sendto(datagram, there.address)
        wait(there)
        assert received(there) == [bytes(range(60))]


def test_a_flood_of_forged_datagrams_is_looked_at_a_bounded_number_at_a_time(sockets):
    there, datagram = sockets(), recorded(sockets, np.arange(60, dtype=np.uint8))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        for _ in range(10):
            plain.sendto(bytes(60), there.address)
        plain.sendto(datagram, there.address)
        for forged in (4, 8):
            wait(there)
            assert received(there, 4) == []
            assert there.forged == forged
        assert received(there, 4) == [bytes(range(60))]
        assert there.forged == 10


@pytest.mark.parametrize("other", [{"key": JobKey(bytes(32))}, {"epoch": 6}], ids=["key", "epoch"])
def test_another_key_or_life_of_the_server_is_dropped(sockets, other):
    there = sockets()
    sockets(**other).send(np.zeros(10, np.uint8), [there.address])
    wait(there)
    assert received(there) == []
    assert there.forged == 1


def test_before_there_is_an_epoch_nothing_is_taken():
    there, here = DatagramSocket(ANY, KEY), DatagramSocket(ANY, KEY)
    here.enter(0)
    here.send(np.zeros(10, np.uint8), [there.address])
    wait(there)
    assert received(there) == []
    there.close()
    here.close()


def test_multicast_is_for_ipv4(sockets):
    with pytest.raises(OptionError, match="239"):
        sockets().join("ff02::1", "127.0.0.1")
