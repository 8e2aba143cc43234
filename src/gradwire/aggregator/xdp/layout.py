"""What the programs and this process lay out in maps, in bytes, and the numbers that both use.

Rounds are kept plus 1, so that 0 is "never".
"""
# Shapes: W = workers, E = elements of a packet, which depends on the width of its sums

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, bitmap_bytes
from gradwire.aggregator.xdp.guard import GUARDS, Guard

INDEX_BITS = 4
MAX_WORKERS = 64
"""Workers whose bitmap is one word."""
WIDTHS = 8, 16
"""Bits of the accumulators that programs add up."""
TABLE_BYTES = 256 * 8
WORKER = struct.Struct("<4sHxx16s16sQ6sxxI4x")
"""Address and port as on the wire; the keys of what the worker sends, and of what it is sent; the number of the next
datagram to it. Then where its last packet came from, which programs fill in: link-layer address and interface."""
RECEIVED_KEY_AT, SENT_KEY_AT, NUMBER_AT, LINK_AT, INTERFACE_AT = 8, 24, 40, 48, 56
FIRST_NUMBER = 1 << 63
"""Number of a program's first datagram to a worker. Those of the Python server are below, and have a window of their
own."""
WINDOW_WORDS = 128
WINDOW = struct.Struct(f"<8xQ{8 * WINDOW_WORDS}s")
"""Numbers that have come from a worker: a lock; 1 above the highest; and a ring of bits. The ring is longer than
`gradwire.net.datagrams.WINDOW`, so that bits which are no longer asked for can be cleared by words."""
NEXT_AT, BITS_AT = 8, 16
MARK, MARK_MASK = 0x47570000, 0xFFFF0000
"""What a copy is marked with for the program that signs it, plus its worker."""
STREAM = struct.Struct("<IIII")
"""First slot, number of packets that the program adds up, table, bits of an accumulator."""
SESSION = struct.Struct("<QQQQQ")
"""Epoch, needed workers, resumed, most misses, and number of streams."""
EPOCH_AT, NEEDED_AT, RESUMED_AT, MISSES_AT, STREAMS_AT = range(0, 40, 8)
ANSWER = struct.Struct("<QQQIHBB")
"""What a program leaves for the next: workers that get a result, that are asked for a contribution, of which round;
slot, buffer, kind of packet for the sender, and whether there is something to send."""


class Counter(IntEnum):
    """Counters of a program, in the words of `PacketCounters`, and answers that it could not pass on."""

    SENT = 0
    SENT_AGAIN = 1
    RECEIVED = 2
    FORGED = 3
    REPLAYED = 4
    CORRUPT = 5
    STALE = 6
    REFUSED = 7
    DUPLICATES = 8
    LATE = 9
    TAKEN = 10
    STUCK = 11


@dataclass(frozen=True)
class Layout:
    """What a program is made for. The rest of a session's configuration is in maps.

    Attributes:
        world_size: Number of workers W, at most `MAX_WORKERS`.
        sizes: Bits of an accumulator, and elements E of a packet with sums of that width, for each width that streams
            have. E is a power of two from 256, or a multiple of 1,024.
        num_buffers: Buffers of a slot: one for the current round, the others for results that a worker may ask for.
        guard_name: Name of the guard in `GUARDS`.
        port: UDP port of the server.
        broadcast: Whether the driver copies results for all workers, instead of traffic control.
    """

    world_size: int
    sizes: tuple[tuple[int, int], ...]
    num_buffers: int
    guard_name: str
    port: int
    broadcast: bool = False

    EXPECTED, OPEN, HEARD, COUNTED, AWAITED, FLAGS, ANSWERED, OLDEST, CURRENT, AHEAD, AHEAD_ROUND = range(8, 96, 8)
    LAST_HEARD = 96

    def covers(self, other: Layout) -> bool:
        """Whether programs for this layout do all that programs for another would."""
        return set(other.sizes) <= set(self.sizes) and replace(self, sizes=other.sizes) == other

    @cached_property
    def guard(self) -> Guard:
        """How packets are verified and sealed."""
        return GUARDS[self.guard_name]()

    @property
    def partial(self) -> bool:
        """Whether results may leave workers out."""
        return self.num_buffers > 2

    @property
    def sums_at(self) -> int:
        """Where the sums begin in a result: behind header and bitmap."""
        return PACKET_HEADER_BYTES + bitmap_bytes(self.world_size)

    def body_bytes(self, width: int) -> int:
        """Bytes of the indices in a packet whose sums have a width in bits."""
        return dict(self.sizes)[width] * INDEX_BITS // 8

    def result_bytes(self, width: int) -> int:
        """Bytes of a result without trailer, for accumulators of a width in bits."""
        return self.sums_at + dict(self.sizes)[width] * width // 8

    @property
    def misses(self) -> int:
        """Where a slot counts how often each worker was left out."""
        return self.LAST_HEARD + 8 * self.world_size

    @property
    def buffers(self) -> int:
        """Where the buffers begin in a slot."""
        return self.misses + (8 * self.world_size if self.partial else 0)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer: its round, and the result, which nobody has signed."""
        longest = max(self.result_bytes(width) for width, _ in self.sizes)
        return 8 + -(-longest // 8) * 8

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.buffers + self.num_buffers * self.buffer_bytes
