"""How a session is spread over servers: whole packets, each at one server, and equal bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.shards import assign, load_bytes
from gradwire.kernels.blocks import INDEX_CHUNK

TABLES = IndexTable(4, tuple(range(16)), 8), IndexTable(5, tuple(2 * value for value in range(32)), 16)
STREAMS = st.builds(
    lambda size, table: Stream(Operation.MAXIMUM, size) if table is None else Stream(Operation.SUM, size, table),
    st.integers(1, 200_000),
    st.sampled_from([None, 0, 1]),
)


def config_of(streams: list[Stream], packet_elements: int = 8192, mtu: int = 0) -> SessionConfig:
    return SessionConfig(3, TABLES, tuple(streams), packet_elements, mtu=mtu)


def loads_of(configs: list[SessionConfig]) -> list[int]:
    return [
        sum(load_bytes(config, number, slice(0, stream.size)) for number, stream in enumerate(config.streams))
        for config in configs
    ]


@given(st.lists(STREAMS, max_size=12), st.integers(1, 5), st.sampled_from([1024, 61_440]), st.sampled_from([0, 1500]))
def test_each_packet_is_whole_at_one_server_and_loads_differ_by_one_packet_at_most(
    streams: list[Stream], num_servers: int, packet_elements: int, mtu: int
) -> None:
    config = config_of(streams, packet_elements, mtu)
    configs, shards = assign(config, num_servers)
    assert len(configs) == num_servers and assign(config, num_servers) == (configs, shards)
    for stream, parts in enumerate(shards):
        edges, body_edges, num_packets = 0, 0, 0
        for part in parts:
            own = configs[part.server]
            assert (part.elements.start, part.body.start) == (edges, body_edges)
            assert part.elements.start % config.packet_size(stream) == 0
            assert own.streams[part.stream].size == part.elements.stop - part.elements.start
            assert own.packet_size(part.stream) == config.packet_size(stream)
            size = own.streams[part.stream].size
            assert own.payload_bytes(part.stream, size) == part.body.stop - part.body.start
            edges, body_edges = part.elements.stop, part.body.stop
            num_packets += own.num_packets(part.stream)
        size = config.streams[stream].size
        assert (edges, body_edges) == (size, config.payload_bytes(stream, size))
        assert num_packets == config.num_packets(stream)
    units = [max(config.packet_size(stream), INDEX_CHUNK) for stream in range(len(streams))]
    largest = max((load_bytes(config, stream, slice(0, unit)) for stream, unit in enumerate(units)), default=0)
    loads = loads_of(configs)
    assert max(loads) - min(loads) <= largest


def test_a_tensor_of_several_packets_has_a_part_at_each_server() -> None:
    _, shards = assign(config_of([Stream(Operation.SUM, 7 * 8192 + 5)]), 3)
    assert [part.elements.stop - part.elements.start for part in shards[0]] == [2 * 8192, 3 * 8192, 2 * 8192 + 5]


@pytest.mark.parametrize("size", [8192 + 1, 3000])
def test_many_uneven_tensors_load_the_servers_equally(size: int) -> None:
    loads = loads_of(assign(config_of([Stream(Operation.SUM, size)] * 100), 2)[0])
    assert loads[0] == loads[1]


def test_a_small_tensor_goes_whole_to_the_server_with_the_fewest_bytes() -> None:
    streams = [Stream(Operation.SUM, size) for size in (100, 5000, 3000, 1500, 400)]
    _, shards = assign(config_of(streams), 2)
    assert [[part.server for part in parts] for parts in shards] == [[1], [0], [1], [1], [1]]
