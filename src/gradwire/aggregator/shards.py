"""Which of several servers adds up which packets of each stream.

Guarantees: the shards depend on the session configuration and the number of servers alone, so all ranks have the same.
Packets are those of a session with one server, and each goes to one server: sums, and who is in them, are the same
bits. All servers carry the same number of bytes, up to those of one packet, or of 1,024 elements if packets are
shorter.

Source: THC (Li et al. 2024), section 7: servers are those of BytePS, which gives each a share of the partitions.
Differences: a stream is cut at packets, and by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.aggregator.session import SessionConfig, Stream
from gradwire.kernels.blocks import INDEX_CHUNK


@dataclass(frozen=True)
class Shard:
    """Consecutive packets of a stream, which one server adds up.

    Attributes:
        server: Index of the server.
        stream: Index of these packets' stream in the session configuration of the server.
        elements: Their elements in the whole stream.
        body: Their bytes in a contribution to the whole stream.
    """

    server: int
    stream: int
    elements: slice
    body: slice


def assign(config: SessionConfig, num_servers: int) -> tuple[list[SessionConfig], list[list[Shard]]]:
    """Spread a session over servers, the largest streams first, so that the smallest ones even out the loads.

    Returns:
        The session configuration of each server, and the shards of each stream.
    """
    loads = [0] * num_servers
    cuts: list[list[tuple[int, slice]]] = [[] for _ in config.streams]
    sizes = [load_bytes(config, stream, slice(0, each.size)) for stream, each in enumerate(config.streams)]
    for stream in sorted(range(len(sizes)), key=lambda stream: -sizes[stream]):
        cuts[stream] = _cut(config, stream, loads)
        for server, elements in cuts[stream]:
            loads[server] += load_bytes(config, stream, elements)
    streams: list[list[Stream]] = [[] for _ in range(num_servers)]
    shards: list[list[Shard]] = [[] for _ in config.streams]
    for stream, each in enumerate(config.streams):
        for server, elements in cuts[stream]:
            body = slice(*(config.payload_bytes(stream, edge) for edge in (elements.start, elements.stop)))
            shards[stream].append(Shard(server, len(streams[server]), elements, body))
            streams[server].append(replace(each, size=elements.stop - elements.start))
    return [replace(config, streams=tuple(each)) for each in streams], shards


def load_bytes(config: SessionConfig, stream: int, elements: slice) -> int:
    """Bytes that a worker sends and receives for some elements of a stream, without headers."""
    size: int = elements.stop - elements.start
    return config.payload_bytes(stream, size) + size * config.result_dtype(stream).itemsize


def _cut(config: SessionConfig, stream: int, loads: list[int]) -> list[tuple[int, slice]]:
    """Cut a stream into whole packets and chunks of indices, in nearly equal numbers, the most for the least load."""
    size, unit = config.streams[stream].size, max(config.packet_size(stream), INDEX_CHUNK)
    each, rest = divmod(size // unit, len(loads))
    lightest = sorted(range(len(loads)), key=lambda server: loads[server])
    of_tail, made, start = lightest[rest], [], 0  # the last packet may be short
    for server in lightest[rest + 1 :] + lightest[: rest + 1]:
        stop = size if server == of_tail else start + unit * (each + (server in lightest[:rest]))
        if start < stop:
            made.append((server, slice(start, stop)))
        start = stop
    return made
