from __future__ import annotations

import pytest

from gradwire.aggregator.datagram_keys import FROM_SERVER, FROM_WORKER, WorkerDatagrams
from gradwire.aggregator.packet import PacketKey, PacketKind, pack
from gradwire.aggregator.retransmission import GRAIN_SECONDS
from gradwire.core.errors import FrameError


def joined(address: tuple[str, int] = ("10.0.0.1", 5000), host: str = "10.0.0.1") -> WorkerDatagrams:
    return WorkerDatagrams.join(1, address, host, lambda use: use.encode().ljust(32))


def ask(round_: int, packet: int = 0, kind: PacketKind = PacketKind.ASK) -> memoryview:
    return memoryview(pack(kind, PacketKey(round_, 1, packet), 1, 5).data)


def test_each_direction_has_a_key_of_its_own():
    uses: list[str] = []
    WorkerDatagrams.join(1, ("::1", 5), "0:0::1", lambda use: uses.append(use) or bytes(32))
    assert uses == [FROM_WORKER, FROM_SERVER]
    assert FROM_WORKER != FROM_SERVER


def test_datagrams_go_to_the_host_of_the_connection():
    assert not joined().validated
    with pytest.raises(FrameError, match=r"at 10\.0\.0\.2, but is connected from 10\.0\.0\.1\. .* without --udp"):
        joined(("10.0.0.2", 5000))


def test_a_result_is_asked_for_twice_within_a_round_trip_at_most():
    worker = joined()
    worker.round_trip_seconds = 0.125
    answered = [at for at in (number / 64 for number in range(128)) if not worker.asks_too_often(ask(3), at)]
    assert len(answered) == 32
    assert all(later - first >= 0.125 for first, later in zip(answered, answered[2:]))
    assert not worker.asks_too_often(ask(4), 2.0)
    assert len(worker._asked) == 2


def test_on_a_short_path_a_result_is_asked_for_twice_within_a_millisecond_at_most():
    worker = joined()
    for began in (0.0, 10.0, 10.0 + 2 * GRAIN_SECONDS):
        asked = [worker.asks_too_often(ask(3), began + GRAIN_SECONDS / 8 * number) for number in range(5)]
        assert asked == [False, False, True, True, True]
    assert not worker.asks_too_often(ask(4), 10.0 + 2.9 * GRAIN_SECONDS)
    assert not worker.asks_too_often(ask(3, packet=1), 10.0 + 2.9 * GRAIN_SECONDS)
    assert worker.asks_too_often(ask(3, kind=PacketKind.DATA), 10.0 + 2.9 * GRAIN_SECONDS)
