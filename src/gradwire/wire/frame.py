"""The frame: a header of 72 bytes, then a body. Every message of every transport is one frame.

Guarantees: arbitrary bytes lead to a `Header` or to `FrameError`, never to another exception; nothing is
allocated by a declared length; a flipped bit anywhere in header or body fails `unpack` or `verify`. Does not
say whether the frame is the one that is due: that is the receiver's `admit`, which compares it with what it
expects. The checksum guards against faults, not against an attacker; who may talk is decided in
`gradwire.net.handshake`.

Layout, little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``GWF1`` |
| 4 | 1 | version |
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
| 64 | 4 | CRC-32C over header (checksum as 0) and body |
| 68 | 4 | reserved, 0 |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag

import google_crc32c
import numpy as np

from gradwire.core.errors import FrameError
from gradwire.core.spec import ELEMENT_TYPES

MAGIC = b"GWF1"
VERSION = 1
HEADER_BYTES = 72
# Far above any gradient, far below where sums of lengths could wrap: a length beyond it is a broken header.
MAX_BODY_BYTES = 1 << 40

_LAYOUT = struct.Struct("<4sBBHHHHBBQQIIQQQII")
assert _LAYOUT.size == HEADER_BYTES
_CHECKSUM_AT = 64
_ZERO_CHECKSUM = b"\x00\x00\x00\x00"
_INDEX_LIMIT = 1 << 63
_DTYPE_CODES = frozenset({0, *ELEMENT_TYPES.values()})


class FrameKind(IntEnum):
    """What a frame carries. Numbers are never reused."""

    PAYLOAD = 1
    """An encoded tensor or range."""
    AGGREGATE = 2
    """Accumulator: a sum of payloads, which no payload decoder reads."""
    STATS = 3
    """Values of a preliminary round."""
    HELLO = 4
    ABORT = 5
    HEARTBEAT = 6
    BYE = 7
    CHALLENGE = 8
    PROOF = 9
    JOIN = 10
    """What a worker of a parameter server has and expects, as JSON."""
    WELCOME = 11
    """Where a parameter server stands, as JSON."""
    GROUPS = 12
    """Hyper-parameters of the optimizer, as JSON."""
    MODEL = 13
    """A parameter's values as they are."""
    DELTA = 14
    """Who was counted in an update of a parameter, and the encoded change of it."""
    PACKET = 15
    """A packet of `gradwire.aggregator`."""
    GOAWAY = 16
    """The sender ends, for the reason that follows; it may be called again, as a successor may take its place."""


class FrameFlags(IntFlag):
    """What the sender says about the tensor of this frame."""

    NONE = 0
    PRESENT = 1
    """The sender took part in the step (it had not joined early)."""
    USED = 2
    """The sender's backward used the parameter."""
    NONFINITE = 4
    """The sender's gradient held a NaN or an infinity."""
    DROPPED = 8
    """The gradients of the step add up to a NaN or an infinity: they have no part in the model."""


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
        kind: what the body is.
        compressor: id of the compressor in the registry; 0 where there is none.
        flags: what the sender says about its gradient.
        sender: rank that sends.
        stage: which encode of the path this is; 0 for a rank's own gradient.
        dtype: code of the element type in `ELEMENT_TYPES`, or 0.
        epoch: 64-bit id of the job's group; frames of another epoch are refused.
        round: synchronization round.
        tensor: index of the tensor in the group's agreed order.
        partition: index of the range in the tensor's plan.
        offset: first element of the range.
        count: elements of the range.
        length: bytes of the body; filled in by `pack` and `seal`.
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
    length: int = 0
    checksum: int = 0


def seal(header: Header, body: np.ndarray) -> bytes:
    """Return the 72 bytes that go in front of `body`, length and checksum filled in; `body` is not copied.

    Raises:
        ValueError: a field does not fit its width, or `body` is not a contiguous uint8 array.
    """
    if body.dtype != np.uint8 or body.ndim != 1 or not body.flags.c_contiguous:
        raise ValueError(
            f"Expected a contiguous 1-D uint8 body, got {body.dtype} of shape {body.shape}. "
            "Pass `np.ascontiguousarray(array).reshape(-1).view(np.uint8)`."
        )
    if body.nbytes > MAX_BODY_BYTES:
        raise ValueError(f"Expected a body of at most {MAX_BODY_BYTES} bytes, got {body.nbytes}. Partition it.")
    if header.offset + header.count > _INDEX_LIMIT:
        raise ValueError(f"Expected a range below 2**63, got offset {header.offset} + count {header.count}.")
    plain = _layout(header, body.nbytes)
    checksum: int = google_crc32c.extend(google_crc32c.value(plain), body)
    return plain[:_CHECKSUM_AT] + checksum.to_bytes(4, "little") + _ZERO_CHECKSUM


def pack(header: Header, body: np.ndarray | bytes = b"") -> bytes:
    """Return the whole frame as bytes. Copies the body: transports use `seal` instead."""
    array = np.frombuffer(body, dtype=np.uint8) if isinstance(body, bytes) else body
    return seal(header, array) + array.tobytes()


def unpack(buffer: bytes | bytearray | memoryview | np.ndarray) -> Header:
    """Return the header at the start of `buffer`. The body, if it is there, is not looked at.

    Raises:
        FrameError: too short, another magic or version, an unknown kind, flag or element type, a reserved
            field in use, or a length or range beyond any tensor.
    """
    view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer)
    if view.nbytes < HEADER_BYTES:
        raise FrameError(f"Expected a header of {HEADER_BYTES} bytes, got {view.nbytes}.")
    (
        magic, version, kind, flags, compressor, sender, stage, dtype, reserved,
        epoch, round_, tensor, partition, offset, count, length, checksum, reserved_end,
    ) = _LAYOUT.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise FrameError(f"Expected magic {MAGIC!r}, got {magic!r}. The other end does not speak gradwire frames.")
    if version != VERSION:
        raise FrameError(f"Expected frame version {VERSION}, got {version}. Run one gradwire version on all ranks.")
    if kind not in _KINDS:
        raise FrameError(f"Expected a known frame kind, got {kind}.")
    if flags > _KNOWN_FLAGS:
        raise FrameError(f"Expected flags within {_KNOWN_FLAGS:#x}, got {flags:#x}.")
    if dtype not in _DTYPE_CODES:
        raise FrameError(f"Expected a known element type code, got {dtype}.")
    if reserved or reserved_end:
        raise FrameError(f"Expected reserved fields of 0, got {reserved} and {reserved_end}.")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"Expected a body of at most {MAX_BODY_BYTES} bytes, got {length} declared.")
    if offset + count > _INDEX_LIMIT:  # Python integers do not wrap
        raise FrameError(f"Expected a range below 2**63, got offset {offset} + count {count}.")
    return Header(
        _KINDS[kind], compressor, _FLAGS[flags], sender, stage, dtype, epoch, round_, tensor, partition,
        offset, count, length, checksum,
    )  # fmt: skip


def verify(header: Header, body: np.ndarray) -> None:
    """Check a received body against its header.

    Raises:
        FrameError: the length or the checksum disagrees.
    """
    if body.nbytes != header.length:
        raise FrameError(f"Expected a body of {header.length} bytes, got {body.nbytes}.")
    found = google_crc32c.extend(google_crc32c.value(_layout(header, header.length)), body)
    if found != header.checksum:
        raise FrameError(
            f"Expected checksum {header.checksum:#010x}, got {found:#010x} (in {describe(header)}). "
            "The network or the memory of a host corrupts data: check both hosts."
        )


def parse(frame: bytes) -> tuple[Header, np.ndarray]:
    """Return header and body of exactly one whole frame, both checked. The body is a view of `frame`.

    Raises:
        FrameError: not exactly one valid frame.
    """
    header = unpack(frame)
    body = np.frombuffer(frame, dtype=np.uint8)[HEADER_BYTES:]
    verify(header, body)
    return header, body


def describe(header: Header) -> str:
    """One line that names a frame in messages and logs."""
    return (
        f"{header.kind.name} of rank {header.sender}, round {header.round}, tensor {header.tensor}, "
        f"partition {header.partition}, stage {header.stage}"
    )


def without_seal(header: Header) -> Header:
    """The header as it was given to `seal`: length and checksum 0."""
    return replace(header, length=0, checksum=0)


def _layout(header: Header, length: int) -> bytes:
    try:
        packed: bytes = _LAYOUT.pack(
            MAGIC, VERSION, header.kind, header.flags, header.compressor, header.sender, header.stage,
            header.dtype, 0, header.epoch, header.round, header.tensor, header.partition, header.offset,
            header.count, length, 0, 0,
        )  # fmt: skip
        return packed
    except struct.error as error:
        raise ValueError(f"Expected header fields within their widths, got {header} ({error}).") from error
