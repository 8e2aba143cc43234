"""What workers and an aggregation server agree on before the first packet, and how it is told: strict JSON.

Everything that a packet could say about sizes is here, so a server takes no length, table or width from one. Lanes that
could overflow are refused here, before anything is sent.

Source: THC (Li et al. 2024), appendix C: packets of 1,024 indices, one table. Differences: any table, any width, any
length of packets, agreed per job and checked.
"""
# Shapes: W = workers, P = indices of a stream

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from gradwire.aggregator.packet import bitmap_bytes
from gradwire.core.errors import FrameError, OptionError
from gradwire.kernels.blocks import INDEX_CHUNK, MAX_INDEX_BITS, index_bytes
from gradwire.kernels.layout import ceil_div

VERSION = 1
MAX_TERMS_BYTES = 16 << 20
"""As JSON; a server allocates no more for first words."""
MAX_WORKERS = 1024
MAX_PACKET_ELEMENTS = 1 << 22
MAX_STREAMS = 1 << 20
MAX_ELEMENTS = 1 << 40
LANES: dict[int, np.dtype[Any]] = {8: np.dtype("<u1"), 16: np.dtype("<u2"), 32: np.dtype("<u4")}
FLOAT: np.dtype[Any] = np.dtype("<f4")


class Operation(Enum):
    """What a server does with the contributions of a stream."""

    SUM = "sum"
    """Looks indices up and adds the values."""
    MAXIMUM = "maximum"
    """Takes the largest float32 of each element. For a minimum, send what is to be minimized with its sign changed."""


@dataclass(frozen=True)
class IndexTable:
    """How indices become integers, and how wide their sums are.

    Attributes:
        bits: of an index, 1 to 8.
        values: 2^bits integers, not negative.
        lane_bits: 8, 16 or 32.
    """

    bits: int
    values: tuple[int, ...]
    lane_bits: int

    @cached_property
    def array(self) -> np.ndarray:
        """The values as kernels take them: uint32[2^bits]."""
        return np.array(self.values, np.uint32)

    def check(self, world_size: int) -> None:
        """Raise unless the sum of `world_size` values fits a lane, whatever they are.

        Raises:
            OptionError: it might not, or this is no table.
        """
        if not 1 <= self.bits <= MAX_INDEX_BITS or len(self.values) != 1 << self.bits or self.lane_bits not in LANES:
            raise OptionError(
                f"Expected 2^bits values and lanes of 8, 16 or 32 bits, got {len(self.values)} values for {self.bits} "
                f"bits and lanes of {self.lane_bits}. Do: take all three from the compressor."
            )
        largest = world_size * max(self.values)
        if min(self.values) < 0 or largest >= 1 << self.lane_bits:
            fitting = [bits for bits in LANES if largest < 1 << bits]
            raise OptionError(
                f"Expected sums within lanes of {self.lane_bits} bits, got {world_size} workers times table values up "
                f"to {max(self.values)}. Do: use lanes of {fitting[0] if fitting else 'more'} bits, or values up to "
                f"{((1 << self.lane_bits) - 1) // world_size}."
            )


@dataclass(frozen=True)
class Stream:
    """One vector that is aggregated once a round.

    Attributes:
        operation: what is done with it.
        size: P, its elements: packed indices, or float32 for a maximum.
        table: index of its table in the terms; 0 for a maximum.
    """

    operation: Operation
    size: int
    table: int = 0


@dataclass(frozen=True)
class SessionConfig:
    """What all workers and the server agree on. Streams are known by their place.

    Attributes:
        world_size: W, how many workers there are.
        tables: of the sums.
        streams: what is aggregated; in each round any of them, in any order.
        packet_elements: elements in a packet, a multiple of 1,024. The last packet of a stream may be shorter.
        fraction: of the workers, rounded up, that must have been heard before a packet is answered; above 1/2. With
            less than 1 a server answers without the rest, and says so.
        max_misses: a worker that a packet's sum went without so many times in a row is waited for.

    Raises:
        OptionError: lanes could overflow, or a number is out of range.
    """

    world_size: int
    tables: tuple[IndexTable, ...]
    streams: tuple[Stream, ...]
    packet_elements: int = 1 << 16
    fraction: float = 1.0
    max_misses: int = 8

    def __post_init__(self) -> None:
        _within("world_size", self.world_size, 1, MAX_WORKERS)
        _within("packet_elements", self.packet_elements, INDEX_CHUNK, MAX_PACKET_ELEMENTS)
        _within("max_misses", self.max_misses, 0, 1 << 16)
        _within("the number of streams", len(self.streams), 0, MAX_STREAMS)
        if self.packet_elements % INDEX_CHUNK:
            raise OptionError(
                f"Expected packets of a multiple of {INDEX_CHUNK} elements, got {self.packet_elements}. Do: pass "
                f"{ceil_div(self.packet_elements, INDEX_CHUNK) * INDEX_CHUNK}."
            )
        if not 0.5 < self.fraction <= 1:
            raise OptionError(f"Expected a fraction above 0.5, up to 1, got {self.fraction}. Do: pass 0.9 or 1.")
        for table in self.tables:
            table.check(self.world_size)
        for stream in self.streams:
            _within("the size of a stream", stream.size, 1, MAX_ELEMENTS)
            if stream.operation is Operation.SUM:
                _within("the table of a stream", stream.table, 0, len(self.tables) - 1)

    @cached_property
    def needed(self) -> int:
        """How many workers must have been heard before a packet is answered."""
        return num_needed(self.fraction, self.world_size)

    def num_packets(self, stream: int) -> int:
        """Packets of a stream."""
        return ceil_div(self.streams[stream].size, self.packet_elements)

    def elements(self, stream: int, packet: int) -> int:
        """Elements of one packet."""
        return min(self.packet_elements, self.streams[stream].size - packet * self.packet_elements)

    def lanes(self, stream: int) -> np.dtype[Any]:
        """Type of a result's elements."""
        found = self.streams[stream]
        return LANES[self.tables[found.table].lane_bits] if found.operation is Operation.SUM else FLOAT

    def payload_bytes(self, stream: int, size: int) -> int:
        """Bytes of so many elements on the way to the server."""
        found = self.streams[stream]
        if found.operation is Operation.SUM:
            return index_bytes(size, self.tables[found.table].bits)
        return FLOAT.itemsize * size

    def result_bytes(self, stream: int, packet: int) -> int:
        """Bytes of the body of a packet's result."""
        return bitmap_bytes(self.world_size) + self.elements(stream, packet) * self.lanes(stream).itemsize

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "tables": [[each.bits, list(each.values), each.lane_bits] for each in self.tables],
            "streams": [[each.operation.value, each.size, each.table] for each in self.streams],
            "packet_elements": self.packet_elements,
            "fraction": self.fraction,
            "max_misses": self.max_misses,
        }

    @classmethod
    def from_json(cls, said: Any) -> SessionConfig:
        """The terms that a worker has said.

        Raises:
            FrameError: these are none.
        """
        try:
            fields = dict(said)
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            tables = tuple(_table(*each) for each in fields.pop("tables"))
            streams = tuple(_stream(*each) for each in fields.pop("streams"))
            fraction = float(fields.pop("fraction"))
            numbers = {name: _integer(value) for name, value in fields.items()}
            return cls(tables=tables, streams=streams, fraction=fraction, **numbers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FrameError(f"Expected terms of an aggregation server, got {error!r}. Run one version.") from error


def num_needed(fraction: float, world_size: int) -> int:
    """A fraction of the workers, rounded up."""
    return max(1, math.ceil(fraction * world_size - 1e-9))


def _table(bits: Any, values: Any, lane_bits: Any) -> IndexTable:
    return IndexTable(_integer(bits), tuple(_integer(value) for value in values), _integer(lane_bits))


def _stream(operation: Any, size: Any, table: Any) -> Stream:
    return Stream(Operation(operation), _integer(size), _integer(table))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} where an integer is expected")
    return value


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise OptionError(f"Expected {what} from {low} to {high}, got {value}. Do: choose a number in that range.")
