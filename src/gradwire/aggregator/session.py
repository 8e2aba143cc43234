"""What workers and an aggregation server agree on before the first packet, and the messages that say so: strict JSON.

The configuration implies all sizes, so a server takes no length, table or width from a packet. Accumulators that could
overflow are refused here, before anything is sent.

Source: THC (Li et al. 2024), appendix C: packets of 1,024 indices, one table. Differences: table, width and packet
length are agreed per job and checked; packets can be bounded in bytes, with fewer elements where they are wide.
"""
# Shapes: W = workers, P = indices of a stream

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, bitmap_bytes
from gradwire.core.errors import FrameError, OptionError
from gradwire.kernels.blocks import INDEX_CHUNK, MAX_INDEX_BITS, index_bytes
from gradwire.kernels.layout import ceil_div
from gradwire.net.datagrams import TRAILER_BYTES
from gradwire.wire.json_message import dump, load

VERSION = 3
NO_EPOCH = 0
"""Epoch of a worker that no server has welcomed yet."""
MAX_CONFIG_BYTES = 16 << 20
"""Largest configuration as JSON. It bounds what a server allocates for a join message."""
MAX_JOIN_BYTES = MAX_CONFIG_BYTES + 4096
MAX_WELCOME_BYTES = 4096
MAX_WORKERS = 1024
MAX_PACKET_ELEMENTS = 1 << 22
MIN_MTU, MAX_MTU = 1280, (1 << 16) - 1
IP_BYTES = 40 + 8
"""IPv6 and UDP headers. Those of IPv4 are shorter."""
MAX_STREAMS = 1 << 20
MAX_ELEMENTS = 1 << 40
GUARD_NAMES = "", "siphash", "crc32c"
ACCUMULATORS: dict[int, np.dtype[Any]] = {8: np.dtype("<u1"), 16: np.dtype("<u2"), 32: np.dtype("<u4")}
FLOAT: np.dtype[Any] = np.dtype("<f4")
Address = tuple[str, int]


class Operation(Enum):
    """How a server combines the contributions to a stream."""

    SUM = "sum"
    """Look up the indices in a table and add the values."""
    MAXIMUM = "maximum"
    """Take the largest float32 of each element. For a minimum, send values with their signs changed."""


@dataclass(frozen=True)
class IndexTable:
    """Lookup table of indices, and the width of the sums of its values.

    Attributes:
        bits: Bits of an index, 1 to 8.
        values: 2^bits nonnegative integers.
        accumulator_bits: Bits of an accumulator, 8, 16 or 32.
    """

    bits: int
    values: tuple[int, ...]
    accumulator_bits: int

    @cached_property
    def array(self) -> np.ndarray:
        """Values as kernels take them, uint32[2^bits]."""
        return np.array(self.values, np.uint32)

    def check(self, world_size: int) -> None:
        """Raise unless every sum of `world_size` values fits the accumulator.

        Raises:
            OptionError: A sum may overflow, or the table is malformed.
        """
        width, in_range = self.accumulator_bits, 1 <= self.bits <= MAX_INDEX_BITS
        if not in_range or len(self.values) != 1 << self.bits or width not in ACCUMULATORS:
            raise OptionError(
                f"A table needs 2^bits values and accumulators of 8, 16 or 32 bits. This one has {len(self.values)} "
                f"values for {self.bits} bits and accumulators of {width} bits. Take all three from the compressor."
            )
        largest = world_size * max(self.values)
        if min(self.values) < 0 or largest >= 1 << width:
            fitting = [bits for bits in ACCUMULATORS if largest < 1 << bits]
            raise OptionError(
                f"Accumulators of {width} bits do not hold the sum of {world_size} workers with table values up to "
                f"{max(self.values)}. Use accumulators of {fitting[0] if fitting else 'more'} bits, or values up to "
                f"{((1 << width) - 1) // world_size}."
            )


@dataclass(frozen=True)
class Stream:
    """A vector that is aggregated once per round.

    Attributes:
        operation: How contributions are combined.
        size: Number of elements P: packed indices, or float32 for a maximum.
        table: Index of the lookup table in `SessionConfig.tables`; 0 for a maximum.
    """

    operation: Operation
    size: int
    table: int = 0


@dataclass(frozen=True)
class SessionConfig:
    """Everything that all workers and the server agree on.

    Attributes:
        world_size: Number of workers W.
        tables: Lookup tables of the sums.
        streams: Vectors to aggregate, each identified by its index. A round may contain any of them, in any order.
        packet_elements: Most elements per packet, a multiple of 1,024. The last packet of a stream may be shorter.
        fraction: Fraction of the workers, rounded up, that a packet's result waits for; above 1/2. Below 1, a server
            may answer without stragglers, and names them.
        max_misses: A worker that was left out of a packet this many times in a row is waited for.
        mtu: Largest datagram in either direction in bytes, with IP and UDP headers; from 1,280. Packets of a stream
            have fewer elements than `packet_elements` where they would exceed it. 0 sets no bound.
        fill_seconds: Time after which a worker replaces a packet of a sum that has not come by zeros; 0 waits for it.
            Maxima are always waited for.

    Raises:
        OptionError: An accumulator may overflow, or a number is out of range.
    """

    world_size: int
    tables: tuple[IndexTable, ...]
    streams: tuple[Stream, ...]
    packet_elements: int = 1 << 16
    fraction: float = 1.0
    max_misses: int = 8
    mtu: int = 0
    fill_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_range("world_size", self.world_size, 1, MAX_WORKERS)
        _check_range("packet_elements", self.packet_elements, INDEX_CHUNK, MAX_PACKET_ELEMENTS)
        _check_range("max_misses", self.max_misses, 0, 1 << 16)
        _check_range("The number of streams", len(self.streams), 0, MAX_STREAMS)
        if self.mtu:
            _check_range("mtu", self.mtu, MIN_MTU, MAX_MTU)
        if self.packet_elements % INDEX_CHUNK:
            raise OptionError(
                f"packet_elements must be a multiple of {INDEX_CHUNK}, not {self.packet_elements}. Pass "
                f"{ceil_div(self.packet_elements, INDEX_CHUNK) * INDEX_CHUNK}."
            )
        if not 0.5 < self.fraction <= 1:
            raise OptionError(f"fraction must be above 0.5 and at most 1, not {self.fraction}. Pass 0.9 or 1.")
        if not 0 <= self.fill_seconds < 1e9:
            raise OptionError(f"fill_seconds must be at least 0, not {self.fill_seconds}. Pass 0.1, or 0 to wait.")
        for table in self.tables:
            table.check(self.world_size)
        for stream in self.streams:
            _check_range("The size of a stream", stream.size, 1, MAX_ELEMENTS)
            if stream.operation is Operation.SUM:
                _check_range("The table of a stream", stream.table, 0, len(self.tables) - 1)

    @cached_property
    def needed(self) -> int:
        """Number of workers that must have been heard before a packet is answered."""
        return num_needed(self.fraction, self.world_size)

    def fills(self, stream: int) -> bool:
        """Whether workers go on without a stream's results after a while."""
        return self.fill_seconds > 0 and self.streams[stream].operation is Operation.SUM

    def packet_size(self, stream: int) -> int:
        """Number of elements in each packet of a stream but the last: whole chunks of 1,024, or a power of two."""
        return self._packet_sizes[stream]

    def num_packets(self, stream: int) -> int:
        """Number of packets of a stream."""
        return ceil_div(self.streams[stream].size, self.packet_size(stream))

    def place(self, stream: int, packet: int) -> slice:
        """Elements of a stream that a packet has."""
        start = packet * self.packet_size(stream)
        return slice(start, start + self.elements(stream, packet))

    def elements(self, stream: int, packet: int) -> int:
        """Number of elements in a packet."""
        size = self.packet_size(stream)
        return min(size, self.streams[stream].size - packet * size)

    def result_dtype(self, stream: int) -> np.dtype[Any]:
        """Element type of a stream's results."""
        found = self.streams[stream]
        if found.operation is Operation.SUM:
            return ACCUMULATORS[self.tables[found.table].accumulator_bits]
        return FLOAT

    def payload_bytes(self, stream: int, size: int) -> int:
        """Size of a contribution of `size` elements, in bytes."""
        found = self.streams[stream]
        if found.operation is Operation.SUM:
            return index_bytes(size, self.tables[found.table].bits)
        return FLOAT.itemsize * size

    def result_bytes(self, stream: int, packet: int) -> int:
        """Size of the body of a packet's result, in bytes."""
        return bitmap_bytes(self.world_size) + self.elements(stream, packet) * self.result_dtype(stream).itemsize

    @cached_property
    def _packet_sizes(self) -> list[int]:
        """Elements per packet of each stream."""
        floats = self._fitting(8 * FLOAT.itemsize)
        sums = [self._fitting(max(table.bits, table.accumulator_bits)) for table in self.tables]
        return [sums[stream.table] if stream.operation is Operation.SUM else floats for stream in self.streams]

    def _fitting(self, bits: int) -> int:
        """Elements per packet, if contributions and results have at most `bits` bits an element."""
        if not self.mtu:
            return self.packet_elements
        body_bytes = self.mtu - IP_BYTES - PACKET_HEADER_BYTES - TRAILER_BYTES - bitmap_bytes(self.world_size)
        fitting = 8 * body_bytes // bits
        if fitting >= INDEX_CHUNK:
            return min(self.packet_elements, fitting // INDEX_CHUNK * INDEX_CHUNK)
        return 1 << fitting.bit_length() - 1

    def check_size(self) -> None:
        """Raise `OptionError` if the configuration is too long for a join message."""
        size = len(dump(self.to_json()))
        if size > MAX_CONFIG_BYTES:
            raise OptionError(
                f"The description of {len(self.streams)} streams takes {size} bytes, and a server accepts at most "
                f"{MAX_CONFIG_BYTES}. Send fewer, larger tensors through the aggregator, or use fewer partitions."
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "tables": [[each.bits, list(each.values), each.accumulator_bits] for each in self.tables],
            "streams": [[each.operation.value, each.size, each.table] for each in self.streams],
            "packet_elements": self.packet_elements,
            "fraction": self.fraction,
            "max_misses": self.max_misses,
            "mtu": self.mtu,
            "fill_seconds": self.fill_seconds,
        }

    @classmethod
    def from_json(cls, received: Any) -> SessionConfig:
        """Return the configuration that a worker sent.

        Raises:
            FrameError: It is malformed.
        """
        try:
            fields = dict(received)
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            tables = tuple(_table(*each) for each in fields.pop("tables"))
            streams = tuple(_stream(*each) for each in fields.pop("streams"))
            fraction, fill_seconds = float(fields.pop("fraction")), float(fields.pop("fill_seconds"))
            numbers = {name: _integer(value) for name, value in fields.items()}
            return cls(tables=tables, streams=streams, fraction=fraction, fill_seconds=fill_seconds, **numbers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FrameError(
                f"The worker's session configuration is invalid: {error!r}. Run the same gradwire version everywhere."
            ) from error


@dataclass(frozen=True)
class AggregatorJoin:
    """First message of a worker on each connection.

    Attributes:
        config: Configuration that the worker expects.
        session: Random number of this start of the job; the same on all workers.
        client: Random number of this client.
        epoch: Epoch of the server that last welcomed the worker, or `NO_EPOCH`.
        stall_seconds: How long the worker lets a result wait for other workers.
        address: IP address and port at which the worker receives datagrams: those of this connection's own host.
    """

    config: SessionConfig
    session: int
    client: int
    epoch: int
    stall_seconds: float
    address: Address

    def to_bytes(self) -> bytes:
        """Return the message as JSON."""
        return dump({**vars(self), "config": self.config.to_json()})

    @classmethod
    def from_bytes(cls, body: bytes) -> AggregatorJoin:
        """Read untrusted bytes. Raises `FrameError` if they are not a join message."""
        fields = load(body)
        try:
            session, client, epoch = (_integer(fields.pop(name), 1 << 64) for name in ("session", "client", "epoch"))
            config, address = SessionConfig.from_json(fields.pop("config")), _address(fields.pop("address"))
            stall = float(fields.pop("stall_seconds"))
            if fields or not 0 < stall < 1e9:
                raise ValueError(f"stall_seconds {stall}, unknown fields {sorted(fields)}")
        except FrameError:
            raise
        except Exception as error:  # whatever is wrong with a peer's bytes costs that peer its connection, and no more
            raise FrameError(f"Not a worker's join message: {error!r}. Run one gradwire version.") from error
        return cls(config, session, client, epoch, stall, address)


@dataclass(frozen=True)
class AggregatorWelcome:
    """The server's answer to a join message.

    Attributes:
        epoch: Incarnation of the server.
        port: UDP port for packets; None if packets travel over this connection.
        group: Multicast group of results; None if each worker is sent its own.
        guard: How datagrams are sealed where a program in the kernel adds up (`gradwire.aggregator.xdp.guard.GUARDS`);
            empty for the seal of `gradwire.net.datagrams`.
    """

    epoch: int
    port: int | None = None
    group: Address | None = None
    guard: str = ""

    def to_bytes(self) -> bytes:
        """Return the message as JSON."""
        return dump(vars(self))

    @classmethod
    def from_bytes(cls, body: bytes) -> AggregatorWelcome:
        """Read untrusted bytes. Raises `FrameError` if they are not a welcome message."""
        fields = load(body)
        try:
            epoch, port, group = _integer(fields.pop("epoch"), 1 << 64), fields.pop("port"), fields.pop("group")
            guard = fields.pop("guard")
            if fields or epoch == NO_EPOCH or guard not in GUARD_NAMES:
                raise ValueError(f"epoch {epoch}, guard {guard!r:.40}, unknown fields {sorted(fields)}")
            return cls(epoch, None if port is None else _port(port), None if group is None else _address(group), guard)
        except Exception as error:
            raise FrameError(f"Not an aggregation server's answer: {error!r}. Run one gradwire version.") from error


def num_needed(fraction: float, world_size: int) -> int:
    """Number of workers that a fraction stands for, rounded up."""
    return max(1, math.ceil(fraction * world_size - 1e-9))


def _table(bits: Any, values: Any, accumulator_bits: Any) -> IndexTable:
    return IndexTable(_integer(bits), tuple(_integer(value) for value in values), _integer(accumulator_bits))


def _stream(operation: Any, size: Any, table: Any) -> Stream:
    return Stream(Operation(operation), _integer(size), _integer(table))


def _integer(value: Any, limit: int | None = None) -> int:
    """A JSON integer; with a limit, one in [0, limit)."""
    if type(value) is not int or (limit is not None and not 0 <= value < limit):
        raise TypeError(f"{value!r:.40} is not a valid integer")
    return value


def _port(value: Any) -> int:
    port = _integer(value, 1 << 16)
    if not port:
        raise ValueError("0 is not a port")
    return port


def _address(value: Any) -> Address:
    host, port = value
    if type(host) is not str or "%" in host:
        raise ValueError(f"{value!r:.80} is not an IP address and a port")
    return str(ipaddress.ip_address(host)), _port(port)


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise OptionError(f"{what} must be from {low} to {high}, not {value}.")
