"""The frame: a header of 72 bytes, then a body. Every message of every transport is one frame.

Guarantees: arbitrary bytes lead to a `Header` or to `FrameError`, never to another exception. A flipped bit anywhere in
header or body fails `unpack` or `verify`. The checksum guards against faults, not against an attacker. Peers
authenticate in `gradwire.net.handshake`, after which frames may have tags (`gradwire.wire.mac`).

This module allocates nothing by a declared length. `net.stream.FrameReader` calls `unpack`, then its `admit` (which
decides whether this frame is expected), then allocates the body, and calls `verify` before it delivers.

Layout, little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``GWF1`` |
| 4 | 1 | version: 1 with a checksum, 2 with a tag |
| 5 | 1 | kind |
| 6 | 2 | flags |
| 8 | 2 | compressor |
| 10 | 2 | sender |
| 12 | 2 | stage |
| 14 | 1 | dtype |
| 15 | 1 | reserved, 0 |
| 16 | 8 | epoch |
| 24 | 8 | round |
| 32 | 4 | tensor |
| 36 | 4 | partition |
| 40 | 8 | offset |
| 48 | 8 | count |
| 56 | 8 | length of the body |
| 64 | 4 | CRC-32C over header (checksum as 0) and body; 0 in version 2 |
| 68 | 4 | members |
| 72 | 16 | version 2 only: tag of the frame |
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag

import google_crc32c
import numpy as np

from gradwire.core.element_codes import ELEMENT_CODES
from gradwire.core.errors import FrameError
from gradwire.wire.mac import TAG_BYTES, FrameMac

MAGIC = b"GWF1"
VERSION = 1
TAGGED_VERSION = 2
HEADER_BYTES = 72
# Far above any gradient, far below where sums of lengths could wrap. A larger length means a broken header.
MAX_BODY_BYTES = 1 << 40

_LAYOUT = struct.Struct("<4sBBHHHHBBQQIIQQQII")
assert _LAYOUT.size == HEADER_BYTES
_CHECKSUM_AT = 64
_MEMBERS_AT = 68
_VERSION_AT = 4
_INDEX_LIMIT = 1 << 63
_DTYPE_CODES = frozenset({0, *ELEMENT_CODES.values()})


class FrameKind(IntEnum):
    """What a frame carries. Numbers are never reused."""

    PAYLOAD = 1
    """An encoded tensor or range."""
    AGGREGATE = 2
    """Accumulator: a sum of payloads, which no payload decoder reads."""
    STATS = 3
    """Values of a preliminary round."""
    HELLO = 4
    """Opens the handshake: protocol version and nonce of the connecting end. See `net.handshake`."""
    ABORT = 5
    """The sender has failed, with a reason. `count` is the rank at fault + 1, or 0 if that is the sender."""
    HEARTBEAT = 6
    """Sign of life of an idle connection."""
    BYE = 7
    """The sender is done, and sends nothing more."""
    CHALLENGE = 8
    """Nonce of the accepting end, its answer to HELLO."""
    PROOF = 9
    """The sender's proof that it holds the job key. The connecting end proves itself first."""
    JOIN = 10
    """State and expectations of a parameter server's worker, as JSON."""
    WELCOME = 11
    """State of a parameter server, as JSON."""
    GROUPS = 12
    """Hyperparameters of the optimizer, as JSON."""
    MODEL = 13
    """Uncompressed values of a parameter."""
    DELTA = 14
    """The workers counted in an update of a parameter, and its encoded change."""
    PACKET = 15
    """A packet of `gradwire.aggregator`."""
    GOAWAY = 16
    """The sender ends, with a reason. It may be called again, since a successor may replace it."""


class FrameFlags(IntFlag):
    """State of the frame's tensor at the sender."""

    NONE = 0
    PRESENT = 1
    """The sender took part in the step: it had not joined early."""
    USED = 2
    """The sender's backward pass used the parameter."""
    NONFINITE = 4
    """The sender's gradient held a NaN or an infinity."""
    DROPPED = 8
    """The gradients of the step add up to a NaN or an infinity, so they are not applied."""


DATA_KINDS = frozenset(
    {
        FrameKind.PAYLOAD, FrameKind.AGGREGATE, FrameKind.STATS,
        FrameKind.JOIN, FrameKind.WELCOME, FrameKind.GROUPS, FrameKind.MODEL, FrameKind.DELTA,
        FrameKind.PACKET,
    }
)  # fmt: skip
_KINDS = {int(kind): kind for kind in FrameKind}
_KNOWN_FLAGS = int(FrameFlags.PRESENT | FrameFlags.USED | FrameFlags.NONFINITE | FrameFlags.DROPPED)
_FLAGS = {bits: FrameFlags(bits) for bits in range(_KNOWN_FLAGS + 1)}


@dataclass(frozen=True, slots=True)
class Header:
    """The fields in front of a body.

    Attributes:
        kind: Kind of the body.
        compressor: Id of the compressor in the registry; 0 if there is none.
        flags: State of the sender's gradient.
        sender: Sending rank.
        stage: Index of this encode on the path; 0 for a rank's own gradient.
        dtype: Code of the element type in `ELEMENT_CODES`, or 0.
        epoch: 64-bit id of the job's group. Frames of another epoch are refused.
        round: Synchronization round.
        tensor: Index of the tensor in the group's agreed order.
        partition: Index of the range in the tensor's plan.
        offset: First element of the range.
        count: Number of elements in the range.
        members: For several tensors that travel together, a hash of what they are; 0 for one.
        length: Bytes of the body; filled in by `pack` and `seal`.
        checksum: CRC-32C; filled in by `pack` and `seal`.
    """

    kind: FrameKind
    compressor: int = 0
    flags: FrameFlags = FrameFlags.NONE
    sender: int = 0
    stage: int = 0
    dtype: int = 0
    epoch: int = 0
    round: int = 0
    tensor: int = 0
    partition: int = 0
    offset: int = 0
    count: int = 0
    members: int = 0
    length: int = 0
    checksum: int = 0


def seal(header: Header, body: np.ndarray) -> bytes:
    """Return the 72 header bytes for `body`, with length and checksum filled in. `body` is not copied.

    Raises:
        ValueError: See `check`.
    """
    return _sealed(check(header, body), body)


def check(header: Header, body: np.ndarray) -> bytes:
    """Return the header bytes for `body` without a checksum.

    Raises:
        ValueError: A field does not fit its width, or `body` is not a contiguous uint8 array.
    """
    if body.dtype != np.uint8 or body.ndim != 1 or not body.flags.c_contiguous:
        raise ValueError(
            f"A frame's body is a contiguous 1-D uint8 array, not {body.dtype} of shape {body.shape}. "
            "Pass `np.ascontiguousarray(array).reshape(-1).view(np.uint8)`."
        )
    if body.nbytes > MAX_BODY_BYTES:
        raise ValueError(f"A body of {body.nbytes} bytes is too large: the limit is {MAX_BODY_BYTES}. Partition it.")
    if header.offset + header.count > _INDEX_LIMIT:
        raise ValueError(f"Offset {header.offset} + count {header.count} must give a range below 2**63.")
    return _layout(header, body.nbytes)


def _sealed(plain: bytes, body: np.ndarray) -> bytes:
    checksum: int = google_crc32c.extend(google_crc32c.value(plain), body)
    return plain[:_CHECKSUM_AT] + checksum.to_bytes(4, "little") + plain[_MEMBERS_AT:]


class Outgoing:
    """A frame on its way out, whose checksum or tag may be computed later, on another thread.

    Args:
        header: All fields but length and checksum.
        body: Contiguous uint8 array.
        on_sent: Called when the kernel has all of it.

    Raises:
        ValueError: See `check`.
    """

    def __init__(self, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        self.body = body
        self.on_sent = on_sent
        self._plain = check(header, body)
        self._mac: FrameMac | None = None
        self._number = 0
        self._sealed: bytes | None = None

    def protect(self, mac: FrameMac, number: int) -> None:
        """Give the frame a tag in place of the checksum; `number` frames go before it."""
        self._mac, self._number = mac, number

    def seal(self) -> bytes:
        """Return the bytes before the body: the header, and the tag, if any.

        Threads may call it at the same time; both compute the same.
        """
        if self._sealed is None:
            self._sealed = _sealed(self._plain, self.body) if self._mac is None else self._tagged(self._mac)
        return self._sealed

    def _tagged(self, mac: FrameMac) -> bytes:
        header = b"".join((self._plain[:_VERSION_AT], bytes([TAGGED_VERSION]), self._plain[_VERSION_AT + 1 :]))
        return header + mac.tag(self._number, header, self.body)


def pack(header: Header, body: np.ndarray | bytes = b"") -> bytes:
    """Return the whole frame as bytes. Copies the body, which `seal` does not."""
    array = np.frombuffer(body, dtype=np.uint8) if isinstance(body, bytes) else body
    return seal(header, array) + array.tobytes()


def prefix_bytes(mac: FrameMac | None) -> int:
    """Bytes before the body of a frame."""
    return HEADER_BYTES if mac is None else HEADER_BYTES + TAG_BYTES


def unpack(buffer: bytes | bytearray | memoryview | np.ndarray, version: int = VERSION) -> Header:
    """Return the header at the start of `buffer`. The body, if any, is not read.

    Raises:
        FrameError: The buffer is too short, magic or version differ, kind, flags or element type are unknown, a
            reserved field is used, or length or range are beyond any tensor.
    """
    view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer)
    if view.nbytes < HEADER_BYTES:
        raise FrameError(f"Expected a header of {HEADER_BYTES} bytes, got {view.nbytes}.")
    (
        magic, found, kind, flags, compressor, sender, stage, dtype, reserved,
        epoch, round_, tensor, partition, offset, count, length, checksum, members,
    ) = _LAYOUT.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise FrameError(f"Expected magic {MAGIC!r}, got {magic!r}. The other end does not send gradwire frames.")
    if found != version:
        raise FrameError(f"Expected frame version {version}, got {found}. Run one gradwire version on all ranks.")
    if kind not in _KINDS:
        raise FrameError(f"Expected a known frame kind, got {kind}.")
    if flags > _KNOWN_FLAGS:
        raise FrameError(f"Expected flags within {_KNOWN_FLAGS:#x}, got {flags:#x}.")
    if dtype not in _DTYPE_CODES:
        raise FrameError(f"Expected a known element type code, got {dtype}.")
    if reserved or (checksum and version == TAGGED_VERSION):
        raise FrameError(f"Expected reserved fields of 0, got {reserved} and {checksum}.")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"Expected a body of at most {MAX_BODY_BYTES} bytes, got {length} declared.")
    if offset + count > _INDEX_LIMIT:  # Python integers do not wrap
        raise FrameError(f"Expected a range below 2**63, got offset {offset} + count {count}.")
    return Header(
        _KINDS[kind], compressor, _FLAGS[flags], sender, stage, dtype, epoch, round_, tensor, partition,
        offset, count, members, length, checksum,
    )  # fmt: skip


def verify(header: Header, body: np.ndarray) -> None:
    """Check a received body against its header.

    Raises:
        FrameError: Length or checksum disagree.
    """
    if body.nbytes != header.length:
        raise FrameError(f"Expected a body of {header.length} bytes, got {body.nbytes}.")
    found = google_crc32c.extend(google_crc32c.value(_layout(header, header.length)), body)
    if found != header.checksum:
        raise FrameError(
            f"Expected checksum {header.checksum:#010x}, got {found:#010x} (in {describe(header)}). "
            "The network or a host's memory corrupts data: check both hosts."
        )


def verify_tag(mac: FrameMac, number: int, prefix: bytes, header: Header, body: np.ndarray) -> None:
    """Check a received frame of version 2; `number` frames went before it, and `prefix` is its header and tag.

    Raises:
        FrameError: The tag is not that of this frame.
    """
    if not mac.matches(prefix[HEADER_BYTES:], number, prefix[:HEADER_BYTES], body):
        raise FrameError(
            f"The tag of frame {number} of this connection is wrong (in {describe(header)}). Somebody on the way, or a "
            "host's memory, changes, drops or repeats what is sent: check the network and both hosts."
        )


def parse(frame: bytes) -> tuple[Header, np.ndarray]:
    """Check exactly one whole frame, and return its header and a view of its body.

    Raises:
        FrameError: The bytes are not exactly one valid frame.
    """
    header = unpack(frame)
    body = np.frombuffer(frame, dtype=np.uint8)[HEADER_BYTES:]
    verify(header, body)
    return header, body


def describe(header: Header) -> str:
    """Return the words that name a frame in messages and logs."""
    return (
        f"{header.kind.name} of rank {header.sender}, round {header.round}, tensor {header.tensor}, "
        f"partition {header.partition}, stage {header.stage}"
    )


def without_seal(header: Header) -> Header:
    """Return the header as it was given to `seal`, with length and checksum 0."""
    return replace(header, length=0, checksum=0)


def _layout(header: Header, length: int) -> bytes:
    try:
        packed: bytes = _LAYOUT.pack(
            MAGIC, VERSION, header.kind, header.flags, header.compressor, header.sender, header.stage,
            header.dtype, 0, header.epoch, header.round, header.tensor, header.partition, header.offset,
            header.count, length, 0, header.members,
        )  # fmt: skip
        return packed
    except struct.error as error:
        raise ValueError(f"Header fields must stay within their widths: {header} ({error}).") from error
