"""Session configurations and join messages: validation, and round trips through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.request import Reply
from gradwire.aggregator.session import (
    MAX_JOIN_BYTES,
    AggregatorJoin,
    AggregatorWelcome,
    IndexTable,
    Operation,
    SessionConfig,
    Stream,
)
from gradwire.core.errors import FrameError, OptionError
from gradwire.net.datagrams import TRAILER_BYTES
from gradwire.wire.frame import FrameFlags
from tests.schedules import jobs

PAPER = IndexTable(2, (0, 3, 8, 30), 8)
SUM, MAXIMUM = Operation.SUM, Operation.MAXIMUM


def test_a_configuration_survives_json() -> None:
    config = SessionConfig(4, (PAPER,), (Stream(SUM, 5000), Stream(MAXIMUM, 5)), 2048, 0.75, 3)
    assert SessionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert (config.needed, config.num_packets(0), config.elements(0, 2), config.num_packets(1)) == (3, 3, 904, 1)
    assert (config.payload_bytes(0, 2048), config.payload_bytes(1, 5)) == (512, 20)


def test_eight_workers_fit_the_papers_accumulators_and_nine_get_advice() -> None:
    SessionConfig(8, (PAPER,), ())
    with pytest.raises(OptionError, match=r"accumulators of 16 bits, or values up to 28"):
        SessionConfig(9, (PAPER,), ())


@given(st.integers(1, 1024), st.integers(1, 2**17), st.sampled_from([8, 16, 32]))
def test_no_accepted_table_can_overflow(world_size: int, largest: int, accumulator_bits: int) -> None:
    try:
        SessionConfig(world_size, (IndexTable(1, (0, largest), accumulator_bits),), ())
    except OptionError:
        assert world_size * largest >= 2**accumulator_bits
    else:
        assert world_size * largest < 2**accumulator_bits


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ({"packet_elements": 1500}, "Pass 2048"),
        ({"fraction": 0.5}, "Pass 0.9 or 1"),
        ({"mtu": 1000}, "mtu must be from 1280 to 65535, not 1000"),
        ({"world_size": 0}, "world_size must be from 1 to"),
        ({"streams": (Stream(SUM, 0),)}, "size of a stream must be from 1 to"),
        ({"streams": (Stream(SUM, 5, table=1),)}, "table of a stream must be from 0 to 0"),
        ({"tables": (IndexTable(2, (0, 1), 8),)}, "2\\^bits values"),
    ],
)
def test_values_out_of_range_are_refused_with_advice(said: dict[str, object], advice: str) -> None:
    with pytest.raises(OptionError, match=advice):
        SessionConfig(**{"world_size": 4, "tables": (PAPER,), "streams": (), **said})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1}, {"world_size": "4"}, {"streams": [["mean", 5, 0]]}, {"streams": [["sum", 5.0, 0]]},
        {"streams": [["sum", 5]]}, {"tables": [[2, "0123", 8]]}, {"fraction": float("nan")}, {"extra": 1},
        {"tables": [[2, [0, 1, 2, 100], 8]]}, {"packet_elements": 1 << 60}, {"world_size": True},
    ],
)  # fmt: skip
def test_malformed_configurations_raise_frame_error(change: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        SessionConfig.from_json({**SessionConfig(4, (PAPER,), ()).to_json(), **change})
    for nonsense in ([], None, 5, "x", {}):
        with pytest.raises(FrameError):
            SessionConfig.from_json(nonsense)


@pytest.mark.parametrize("world_size", [1, 4, 64, 1024])
@pytest.mark.parametrize("mtu", [1280, 1500, 9000, 65_535])
def test_no_packet_exceeds_the_mtu(world_size: int, mtu: int) -> None:
    tables = tuple(IndexTable(bits, (0,) * (1 << bits), width) for bits in range(1, 9) for width in (8, 16, 32))
    streams = *(Stream(SUM, 100_000, table) for table in range(len(tables))), Stream(MAXIMUM, 100_000)
    config = SessionConfig(world_size, tables, streams, mtu=mtu)
    for stream in range(len(streams)):
        size = config.packet_size(stream)
        body_bytes = max(config.payload_bytes(stream, size), config.result_bytes(stream, 0))
        packet_bytes = 48 + PACKET_HEADER_BYTES + TRAILER_BYTES + body_bytes  # of IPv6, whose headers are the longest
        assert packet_bytes <= mtu < 2 * packet_bytes
        places = [config.place(stream, packet) for packet in range(config.num_packets(stream))]
        assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
        assert places[-1].stop == 100_000


def test_packets_of_an_ethernet_frame_have_the_papers_1024_indices_or_half_of_them() -> None:
    tables = PAPER, IndexTable(4, tuple(range(16)), 16), IndexTable(4, tuple(range(16)), 32)
    streams = Stream(SUM, 5000), Stream(SUM, 5000, 1), Stream(SUM, 5000, 2), Stream(MAXIMUM, 5000)
    config = SessionConfig(4, tables, streams, mtu=1500)
    assert [config.packet_size(stream) for stream in range(4)] == [1024, 512, 256, 256]
    assert SessionConfig(4, tables, streams, 2048, mtu=9000).packet_size(0) == 2048


def test_counts_by_block() -> None:
    counted = np.array([[True, True], [True, False]])
    reply = Reply(counted.sum(1), counted, FrameFlags.NONE, 2048, np.zeros(counted.shape[0], bool))
    assert reply.counts_of_blocks(1024, 3).tolist() == [2, 2, 1]
    assert reply.counted_blocks(1, 2048, 2).tolist() == [True, False]
    with pytest.raises(ValueError, match="packet_elements as a multiple"):
        reply.counts_of_blocks(4096, 1)
    same = Reply(np.array([2, 2]), np.ones((2, 2), bool), FrameFlags.NONE, 1024, np.zeros(2, bool))
    assert same.counts_of_blocks(4096, 1).tolist() == [2]
    assert same.counts_of_blocks(1024, 3).tolist() == [2] * 3, "blocks may be shorter than the compressor's, if full"


# -- join and welcome -----------------------------------------------------------------------------------------


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(jobs.JOIN.to_bytes()), **fields}).encode()


@pytest.mark.parametrize("host", ["127.0.0.1", "fd00::1"])
def test_join_and_welcome_survive_json(host):
    join = replace(jobs.JOIN, address=(host, 5000))
    assert AggregatorJoin.from_bytes(join.to_bytes()) == join
    for welcome in jobs.WELCOMES:
        assert AggregatorWelcome.from_bytes(welcome.to_bytes()) == welcome


@pytest.mark.parametrize(
    "fields",
    [
        {"stall_seconds": 10**400}, {"stall_seconds": float("nan")}, {"stall_seconds": 0}, {"stall_seconds": []},
        {"address": ["a\0", 5]}, {"address": ["a.example", 5]}, {"address": ["fe80::1%a\0", 5]},
        {"address": ["127.0.0.1", 1 << 16]}, {"address": 5}, {"client": -1}, {"epoch": 1 << 64}, {"session": 1.0},
        {"more": 1}, {"config": {**jobs.config().to_json(), "fraction": 10**400}},
    ],
    ids=lambda fields: f"{fields!r:.40}",
)  # fmt: skip
def test_malformed_join_messages_raise_frame_error(fields):
    with pytest.raises(FrameError):
        AggregatorJoin.from_bytes(changed(**fields))


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"null", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_arbitrary_bytes_raise_frame_error(body):
    for words in (AggregatorJoin, AggregatorWelcome):
        with pytest.raises(FrameError):
            words.from_bytes(body)


def test_a_configuration_that_is_too_long_is_refused_with_advice():
    many = SessionConfig(2, (jobs.WIDE,), (Stream(Operation.SUM, 1 << 40),) * (1 << 20))
    with pytest.raises(OptionError, match="fewer, larger tensors"):
        many.check_size()
    jobs.config().check_size()
    assert len(jobs.JOIN.to_bytes()) < MAX_JOIN_BYTES
