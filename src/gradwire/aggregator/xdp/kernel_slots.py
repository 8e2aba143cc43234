"""One session's sums in the kernel: maps, the program for them, and what Python must know of them.

Compiling takes most of the time, so a server compiles before its workers join (`prepare`), and sessions of one layout
share what was compiled.
"""

from __future__ import annotations

import bisect
import functools
import ipaddress
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradwire.aggregator.packet import PacketCounters
from gradwire.aggregator.session import MAX_MTU, MIN_MTU, IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp import broadcast as broadcasts
from gradwire.aggregator.xdp import copies, signatures
from gradwire.aggregator.xdp import layout as layouts
from gradwire.aggregator.xdp import program as programs
from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.guard import TABLE_BYTES as CHECKSUM_BYTES
from gradwire.aggregator.xdp.guard import checksum_tables
from gradwire.aggregator.xdp.layout import Counter, Layout
from gradwire.aggregator.xdp.loader import load_object
from gradwire.aggregator.xdp.maps import ArrayMap, CounterMap, DeviceMap, SharedMap
from gradwire.aggregator.xdp.system import AttachType, Descriptor, ProgramType
from gradwire.core.errors import OptionError
from gradwire.kernels.blocks import INDEX_CHUNK

_NO_SIZES = ((layouts.WIDTHS[0], INDEX_CHUNK),)
"""Of a session of which the program adds up nothing."""


class SlotState(NamedTuple):
    """The current round of a slot.

    Attributes:
        expected_round: Its number.
        is_open: Whether it has not been answered.
        heard: Bitmap of the workers heard in it.
        num_answered: Number of rounds answered.
    """

    expected_round: int
    is_open: bool
    heard: int
    num_answered: int

    def may_lack(self, worker: int) -> bool:
        """Return whether the round waits for a worker that an earlier incarnation of the server may have answered."""
        return self.is_open and not self.num_answered and not self.heard >> worker & 1


class KernelSlots:
    """Maps of one session configuration, and the program that adds up in them.

    Args:
        config: Session configuration.
        guard_name: Name of the guard in `gradwire.aggregator.xdp.guard.GUARDS`.
        port: UDP port of the server.
        prepared: Layout whose programs are compiled already. It is used if it covers the session's.
        broadcast: Whether the driver copies results for all workers; see `send_through`.

    Attributes:
        layout: What the program is made for.
        streams: For each stream, the number of packets that the program adds up; 0 for those that Python does.
        program: The XDP program.
        copier: The program that sends copies of its answers.
        signer: The program that signs the copies.

    Raises:
        RightsError: This process may not use BPF.
        OptionError: The kernel lacks memory or a feature, or the configuration has too many workers.
    """

    def __init__(
        self, config: SessionConfig, guard_name: str, port: int, prepared: Layout | None = None, *,
        broadcast: bool = False,
    ) -> None:  # fmt: skip
        self.config = config
        own = _layout(config, guard_name, port, broadcast)
        self.layout = prepared if prepared is not None and prepared.covers(own) else own
        self._is_new = True
        self.streams = [_full_packets(config, stream) for stream in range(len(config.streams))]
        self._ends = list(itertools.accumulate(self.streams))  # slot behind the last of each stream
        num_slots = max(1, sum(self.streams))
        self.session = ArrayMap(programs.SESSION_MAP, layouts.SESSION.size, 1)
        self.workers = ArrayMap(programs.WORKERS_MAP, layouts.WORKER.size, config.world_size)
        self.windows = ArrayMap(programs.WINDOWS_MAP, layouts.WINDOW.size, config.world_size, locked=True)
        self.counters = CounterMap(programs.COUNTERS_MAP, len(Counter))
        self.slots = ArrayMap(programs.SLOTS_MAP, self.layout.slot_bytes, num_slots, locked=True)
        self.began = SharedMap(programs.BEGAN_MAP, 8, num_slots)
        self._streams = ArrayMap(programs.STREAMS_MAP, layouts.STREAM.size, max(1, len(config.streams)))
        self._tables = ArrayMap(programs.TABLES_MAP, layouts.TABLE_BYTES, max(1, len(config.tables)))
        self._checksums = ArrayMap(programs.CHECKSUMS_MAP, CHECKSUM_BYTES, 1)
        self._devices = DeviceMap(programs.DEVICES_MAP, config.world_size + 1)
        self._turns = ArrayMap(programs.TURNS_MAP, 8, num_slots if broadcast else 1)
        self._fill()
        self.program = load_object(_compiled(programs.emit, self.layout), "xdp", ProgramType.XDP, self.maps)
        self.copier = load_object(_compiled(copies.emit, self.layout), "tc", ProgramType.TRAFFIC_CONTROL, self.maps)
        self.signer = load_object(_compiled(signatures.emit, self.layout), "tc", ProgramType.TRAFFIC_CONTROL, self.maps)
        self._sender = Descriptor(-1)
        if broadcast:
            elf = _compiled(broadcasts.emit, self.layout)
            self._sender = load_object(elf, "xdp", ProgramType.XDP, self.maps, AttachType.XDP_DEVICE_MAP)

    @property
    def maps(self) -> Sequence[ArrayMap]:
        """All maps of the session."""
        return (
            self.session, self.workers, self.windows, self.counters, self.slots, self.began, self._streams,
            self._tables, self._checksums, self._devices, self._turns,
        )  # fmt: skip

    def begin(self, epoch: int) -> None:
        """Take packets of an incarnation of the server, with nothing heard before."""
        config = self.config
        needed = config.needed if self.layout.partial else config.world_size
        if not self._is_new:  # the kernel creates maps full of zeros
            for slot in range(self.slots.num_values):
                self.slots.write(slot, bytes(self.layout.slot_bytes))
            self.began.view[:] = 0
            self.counters.clear()
        self._is_new = False
        numbers = epoch, needed, 0, config.max_misses, len(config.streams)
        self.session.write(0, layouts.SESSION.pack(*numbers))

    def resume(self) -> None:
        """Note that an earlier incarnation of the server has answered some of the workers."""
        epoch, needed, _, *rest = layouts.SESSION.unpack(self.session.read(0))
        self.session.write(0, layouts.SESSION.pack(epoch, needed, 1, *rest))

    def join(self, worker: int, address: tuple[str, int], received_key: bytes, sent_key: bytes) -> None:
        """Take packets of a worker from its address alone, by the keys of both directions, of 16 bytes each."""
        host = ipaddress.IPv4Address(address[0]).packed
        port = int.from_bytes(address[1].to_bytes(2, "big"), "little")
        record = layouts.WORKER.pack(host, port, received_key, sent_key, layouts.FIRST_NUMBER, bytes(6), 0)
        self.workers.write(worker, record)
        self.windows.write(worker, bytes(layouts.WINDOW.size))

    def reaches(self, worker: int) -> bool:
        """Return whether a packet of a worker has come since it joined: the programs send where it came from."""
        (interface,) = struct.unpack_from("<I", self.workers.read(worker), layouts.INTERFACE_AT)
        return bool(interface)

    def send_through(self, interface: int) -> None:
        """Let the driver of the interface with this index send the copies of results, if it is to broadcast them."""
        for key in range(self._devices.num_values if self.layout.broadcast else 0):
            self._devices.send(key, interface, self._sender)

    def counted(self) -> PacketCounters:
        """Return what has happened to the packets that the program has processed."""
        totals = self.counters.totals()
        return PacketCounters(**{each.name.lower(): totals[each] for each in Counter if each is not Counter.STUCK})

    def num_stuck(self) -> int:
        """Return how many answers the program could not pass on, because the driver keeps no metadata for it."""
        return self.counters.totals()[Counter.STUCK]

    def result(self, slot: int, buffer: int) -> bytes:
        """Return a result as it is kept, not signed."""
        layout = self.layout
        width = self.config.tables[self.config.streams[self.place(slot)[0]].table].accumulator_bits
        start = layout.buffers + buffer * layout.buffer_bytes + 8
        return self.slots.read(slot)[start : start + layout.result_bytes(width)]

    def times(self) -> np.ndarray:
        """Return when the open rounds began, in ns of the monotonic clock, or 0 for a slot without one: uint64[slots].

        It is a copy: the kernel goes on writing.
        """
        return self.began.view.view(np.uint64)[:, 0].copy()

    def state(self, slot: int) -> SlotState:
        """Return what a slot says of its current round."""
        value, layout = self.slots.read(slot), self.layout
        expected, is_open, heard = struct.unpack_from("<QQQ", value, layout.EXPECTED)
        (num_answered,) = struct.unpack_from("<Q", value, layout.ANSWERED)
        return SlotState(expected - 1, bool(is_open), heard, num_answered)

    def place(self, slot: int) -> tuple[int, int]:
        """Return the stream and the packet of a slot."""
        ends = self._ends
        stream = bisect.bisect_right(ends, slot)
        return stream, slot - ends[stream] + self.streams[stream]

    def close(self) -> None:
        """Give everything back to the kernel. Idempotent."""
        for each in (*self.maps, self.program, self.copier, self.signer, self._sender):
            each.close()

    def _fill(self) -> None:
        config, first = self.config, 0
        for number, table in enumerate(config.tables):
            if table.bits == layouts.INDEX_BITS:
                self._tables.write(number, _pairs(table.array))
        for stream, count in enumerate(self.streams):
            table_number = config.streams[stream].table
            width = config.tables[table_number].accumulator_bits if count else 0
            self._streams.write(stream, layouts.STREAM.pack(first, count, table_number, width))
            first += count
        self._checksums.write(0, checksum_tables())


def prepare(world_size: int, mtu: int, guard_name: str, port: int, *, broadcast: bool = False) -> Layout:
    """Compile programs for sessions whose packets fill frames of an MTU, and which leave no worker out.

    Raises:
        OptionError: There are too many workers.
    """
    tables = tuple(IndexTable(layouts.INDEX_BITS, (0,) * 16, width) for width in layouts.WIDTHS)
    streams = tuple(Stream(Operation.SUM, mtu * 8, number) for number in range(len(tables)))
    config = SessionConfig(world_size, tables, streams, mtu=min(max(mtu, MIN_MTU), MAX_MTU))
    found = _layout(config, guard_name, port, broadcast)
    for emit in (programs.emit, copies.emit, signatures.emit, *([broadcasts.emit] if broadcast else [])):
        _compiled(emit, found)
    return found


@functools.lru_cache(maxsize=64)
def _compiled(emit: Callable[[Layout], Assembler], layout: Layout) -> bytes:
    return emit(layout).compile()


def _layout(config: SessionConfig, guard_name: str, port: int, broadcast: bool) -> Layout:
    if config.world_size > layouts.MAX_WORKERS:
        raise OptionError(
            f"--xdp adds up for at most {layouts.MAX_WORKERS} workers, not {config.world_size}. Serve without --xdp."
        )
    partial = config.needed < config.world_size and config.max_misses > 0
    streams = [stream for stream in range(len(config.streams)) if _full_packets(config, stream)]
    sizes = {8 * config.result_dtype(stream).itemsize: config.packet_size(stream) for stream in streams}
    num_buffers = config.max_misses + 2 if partial else 2
    all_sizes = tuple(sorted(sizes.items())) or _NO_SIZES
    return Layout(config.world_size, all_sizes, num_buffers, guard_name, port, broadcast)


def _full_packets(config: SessionConfig, stream: int) -> int:
    """Number of packets of a stream that the program adds up: full ones of 4-bit indices with sums of 8 or 16 bits."""
    found = config.streams[stream]
    if found.operation is not Operation.SUM:
        return 0
    table = config.tables[found.table]
    if table.bits != layouts.INDEX_BITS or table.accumulator_bits not in layouts.WIDTHS:
        return 0
    return found.size // config.packet_size(stream)


def _pairs(values: np.ndarray) -> bytes:
    """Return the values of both indices of each byte, the second one 32 bits above the first: uint64[256]."""
    byte = np.arange(256)
    pairs: np.ndarray = values[byte & 15].astype("<u8") | values[byte >> 4].astype("<u8") << np.uint64(32)
    return pairs.tobytes()
