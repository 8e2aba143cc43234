"""Results from a group, proven by hashes that come another way, in any order and with losses."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.aggregator.multicast import ResultHashes, UnprovenResults, hashes_of
from gradwire.aggregator.packet import SERVER, PacketKey, PacketKind, pack, unpack
from gradwire.core.errors import FrameError

KEY = PacketKey(3, 1, 0)


def result(key: PacketKey, content: bytes) -> np.ndarray:
    return pack(PacketKind.RESULT, key, SERVER, 5, content)


def test_hashes_are_listed_in_packets_that_fit_an_ethernet_frame():
    hashes, keys = ResultHashes(), [PacketKey(1 << 63, stream, 7) for stream in range(60)]
    for key in keys:
        hashes.add(result(key, b"abc"))
    packets = [unpack(packet) for packet in hashes.flush(5)]
    assert all(packet.kind is PacketKind.DIGEST and packet.worker == SERVER for packet in packets)
    assert all(44 + packet.body.nbytes <= 1500 - 28 - 24 for packet in packets)
    found = [each for packet in packets for each in hashes_of(packet.body)]
    assert found == [(key, hashlib.sha256(result(key, b"abc")).digest()) for key in keys]
    assert hashes.flush(5) == []


def test_a_body_of_another_size_is_refused():
    with pytest.raises(FrameError, match="hashes of 48 bytes"):
        hashes_of(np.zeros(49, np.uint8))


@given(st.lists(st.sampled_from(["result", "forged", "hash"]), max_size=8))
def test_only_the_result_with_the_hash_comes_out(events):
    true, unproven = b"true", UnprovenResults()
    out: list[bytes] = []
    for number, event in enumerate(events):
        if event == "hash":
            found = unproven.add_hash(KEY, hashlib.sha256(true).digest())
            out += [] if found is None else [found]
        else:
            packet = true if event == "result" else b"forged %d" % number
            out += [packet] * unproven.add_result(KEY, packet)
    assert set(out) <= {true}
    first_two = [event for event in events if event != "hash"][:2]
    if "hash" in events and (
        "result" in events[events.index("hash") :] or ("result" in first_two and events.index("hash") > 1)
    ):
        assert out


def test_what_is_kept_is_bounded_and_forgotten():
    unproven = UnprovenResults()
    for number in range(100):
        assert not unproven.add_result(KEY, b"forged %d" % number)
    assert sum(map(len, unproven._results.values())) == 2
    unproven.forget(KEY)
    assert unproven.add_hash(KEY, hashlib.sha256(b"forged 0").digest()) is None
    unproven.forget(KEY)
    assert unproven._results == unproven._hashes == {}
