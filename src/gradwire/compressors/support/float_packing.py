"""Base of `lossless` and `gcomp`: a block of packed floats, and the table of its prefix code.

Body: magic, uint16; 0 if the elements are stored, else the kind of their packing, uint8; element type, uint8, as in
frames; the number of the code's table, uint32. Then the elements, or the packed elements: for kind 1 the output of
`kernels.pack_floats`, for kind 2 that of `kernels.pack_fixed`, which has no table; for kind 3 see `gcomp`. float64 is
always stored.

Each tensor gets a table of its own. Every `refresh` steps, the exponents of its averaged gradient are counted. All
ranks hold the same bits, so all find the same table, and nothing is sent; payloads carry the number of their
table. A rank's own gradient may have more zeros than the average, so zero keeps a share of at least `SHARE_OF_ZERO`. A
new table is only a candidate, which the state holds after the table in use: it replaces that if it is clearly better on
the average of the next step, too. A gradient that is almost all zeros yields no candidate.

Source: GCOMP (SoCC 2024), sections 4 and 6; section 4.4 for new tables. Differences: a table per tensor, without an
exchange between ranks, and judged on another step than the one that it was made from; the differences of
`kernels.float_format` and `kernels.prefix_code`.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Compressor, FeedbackName, StatefulCompressor, StateSource
from gradwire.compressors.base.array import expect, scratch
from gradwire.compressors.base.options import integer
from gradwire.compressors.none import ARRAY_DTYPES, NoCompression, convert
from gradwire.compressors.support import exponent_prior
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, OptionTypeError, PayloadError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.float_format import FORMATS
from gradwire.kernels.prefix_code import ESCAPE, NUM_SYMBOLS, RAW_BITS, SERIAL_BYTES, PrefixCode, code_of_bytes
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

HEADER = struct.Struct("<HBBI")
HEADER_BYTES = HEADER.size
KIND = 2  # offset of the kind
MAGIC = 0x4347
STORED = 0
SHARE_OF_ZERO = 1 / 16
LEAST_COUNTED = 1024  # exponents of nonzero elements that a table needs
MIN_GAIN_BITS = 0.02  # per element


@dataclass(frozen=True)
class Packing:
    """Kernels that pack the elements of a payload, and what its header says about them.

    Attributes:
        kind: Kind of the packing, not 0.
        number: Number of the table.
        pack: See `kernels.pack_floats`.
        unpack: See `kernels.unpack_floats`.
        packs_shorter: See `kernels.packs_shorter`.
    """

    kind: int
    number: int
    pack: Callable[[np.ndarray, np.ndarray], tuple[int, bool]]
    unpack: Callable[[np.ndarray, np.ndarray], bool]
    packs_shorter: Callable[[np.ndarray], bool]

    @classmethod
    def prefix(cls, code: PrefixCode) -> Packing:
        """Exponents in a prefix code."""
        return cls(
            1,
            code.number,
            lambda x, out: kernels.pack_floats(x, code, out),
            lambda body, out: kernels.unpack_floats(body, code, out),
            lambda x: kernels.packs_shorter(x, code),
        )

    @classmethod
    def fixed(cls) -> Packing:
        """Exponents in codes of four bits."""
        return cls(2, 0, kernels.pack_fixed, kernels.unpack_fixed, kernels.packs_shorter_fixed)


class FloatPacking(NoCompression, StatefulCompressor):
    """A compressor of packed floats. Its state is a table; encoder and decoder must have the same.

    Args:
        table: Lengths of the prefix code's words, 129 bytes in hexadecimal, as `PrefixCode.to_bytes` returns them; the
            empty string is the table of `exponent_prior`.
        refresh: Number of steps after which each tensor gets a new table; 0 for never.
    """

    dense = False
    elementwise = False
    default_feedback: FeedbackName = "none"
    state_source: ClassVar[StateSource] = "mean"

    def __init__(self, table: str = "", refresh: int = 50) -> None:
        self.table = _checked(table)
        self.refresh = integer("refresh", refresh, 0, 1 << 53)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"table": self.table, "refresh": self.refresh}

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Size of the tensor and of a header."""
        return HEADER_BYTES + spec.nbytes

    def code(self, dtype: torch.dtype, state: np.ndarray | None = None) -> PrefixCode:
        """Prefix code of a state that is a table; otherwise the initial one of an element type."""
        return _table_in(state, 0) or self._initial_code(dtype)

    def _initial_code(self, dtype: torch.dtype) -> PrefixCode:
        return code_of_bytes(bytes.fromhex(self.table)) if self.table else exponent_prior.code(dtype)

    def packing(self, dtype: torch.dtype, state: np.ndarray | None) -> Packing:
        """How elements are packed."""
        return Packing.prefix(self.code(dtype, state))

    def next_state(self, source: np.ndarray, ctx: Context) -> np.ndarray | None:
        """Table in use, and the candidate that every `refresh` steps is made from the averaged gradient."""
        if not self.refresh or source.dtype not in FORMATS or ctx.spec is None:
            return None
        is_due, candidate = (ctx.step - 1) % self.refresh == 0, _table_in(ctx.state, 1)
        if not is_due and candidate is None:
            return None
        counts = np.zeros(NUM_SYMBOLS, np.int64)
        kernels.exponent_counts(source, counts)
        return next_tables(self.code(ctx.spec.dtype, ctx.state), candidate, counts, is_due)

    # -- packing ---------------------------------------------------------------------------------------------

    def _pack(self, x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context) -> tuple[Payload, np.ndarray]:
        elements = self._elements_to_send(x, dtype, scale)
        body, finite = self._body(elements, dtype, ctx)
        return Payload(body, nonfinite=not finite), elements

    def _elements_to_send(self, x: np.ndarray, dtype: torch.dtype, scale: float) -> np.ndarray:
        """Elements that `none` would send."""
        element = ARRAY_DTYPES[dtype]
        if scale == 1.0 and x.dtype == element:
            return x
        elements = scratch(x.size * dtype.itemsize).view(element)
        convert(x, elements, scale)
        return elements

    def _body(self, elements: np.ndarray, dtype: torch.dtype, ctx: Context) -> tuple[np.ndarray, bool]:
        """The packed elements behind a header, and whether all are finite."""
        body = buffers.empty(HEADER_BYTES + elements.nbytes)
        packing = self.packing(dtype, ctx.state)
        if dtype == torch.float64:
            length, finite = -1, bool(np.isfinite(elements).all())  # kernels calculate in float32
        else:
            length, finite = packing.pack(elements, body[HEADER_BYTES:])
        kind = STORED if length < 0 else packing.kind
        HEADER.pack_into(body.data, 0, MAGIC, kind, ELEMENT_TYPES[dtype], packing.number)
        if kind != STORED:
            return body[: HEADER_BYTES + length], finite
        body[HEADER_BYTES:] = elements.view(np.uint8)
        return body, finite

    # -- unpacking -------------------------------------------------------------------------------------------

    decode_sum = Compressor.decode_sum

    def _elements(
        self, payload: Payload, ctx: Context, dtype: torch.dtype, target: np.ndarray, fits: bool = False
    ) -> np.ndarray:
        elements = target if fits else scratch(target.size * dtype.itemsize).view(ARRAY_DTYPES[dtype])
        self._unpack(payload, dtype, elements, ctx)
        return elements

    def _unpack(self, payload: Payload, dtype: torch.dtype, elements: np.ndarray, ctx: Context) -> None:
        """Decode a body of untrusted bytes into `elements`."""
        body, packing = payload.body, self.packing(dtype, ctx.state)
        if body.nbytes < HEADER_BYTES:
            raise PayloadError(f"Expected a {self.name} payload of at least {HEADER_BYTES} bytes, got {body.nbytes}.")
        kind, number = self._kind_and_number(body, dtype)
        expect(kind in (STORED, packing.kind), "a block that is stored or packed", kind, self.name)
        expect(number == packing.number, f"words of the table {packing.number:#010x}", f"{number:#010x}", self.name)
        if kind != STORED:
            packed = dtype != torch.float64 and packing.unpack(body[HEADER_BYTES:], elements)
            expect(packed, f"what packs {elements.size} elements", "something else", self.name)
            return
        stored = Reader(self._expect_bytes(payload, HEADER_BYTES + elements.nbytes)[HEADER_BYTES:])
        elements[:] = stored.array(elements.dtype, elements.size)
        longer = dtype == torch.float64 or not packing.packs_shorter(elements)
        expect(longer, "elements that are packed, since that is shorter", "stored ones", self.name)

    def _kind_and_number(self, body: np.ndarray, dtype: torch.dtype) -> tuple[int, int]:
        """Kind and number in a header, of which all else is checked."""
        magic, kind, element, number = HEADER.unpack(bytes(body[:HEADER_BYTES]))
        expect(magic == MAGIC, f"a block that begins with {MAGIC:#06x}", f"{magic:#06x}", self.name)
        expect(element == ELEMENT_TYPES[dtype], f"elements of {dtype}", f"type {element}", self.name)
        return kind, number


def _checked(table: object) -> str:
    """The option `table`, after a check."""
    if not isinstance(table, str):
        raise OptionTypeError(f"table must be a string, not {table!r}. Pass PrefixCode.of(counts).to_bytes().hex().")
    if table:
        try:
            code_of_bytes(bytes.fromhex(table))
        except ValueError as error:
            raise OptionError(
                f"table must be {SERIAL_BYTES} bytes of code lengths in hexadecimal: {error} "
                "Pass PrefixCode.of(counts).to_bytes().hex()."
            ) from error
    return table


def next_tables(
    present: PrefixCode, candidate: PrefixCode | None, counts: np.ndarray, is_due: bool
) -> np.ndarray | None:
    """The state after a step with these counts; None to keep the one before.

    Args:
        present: Table in use.
        candidate: Table made from an earlier step, if there is one.
        counts: Symbols of this step's averaged gradient, int64[257]. Zeros are increased.
        is_due: Whether this step yields a candidate.
    """
    if counts[1:].sum() < LEAST_COUNTED:
        return None
    counts[0] = max(int(counts[0]), int(counts.sum() * SHARE_OF_ZERO))
    if candidate is not None and _is_better(candidate, present, counts):
        present = candidate
    fresh = PrefixCode.of(counts) if is_due else None
    if fresh is not None and not _is_better(fresh, present, counts):
        fresh = None
    if fresh is None and candidate is None:
        return None
    tables = present.to_bytes() + (fresh.to_bytes() if fresh is not None else b"")
    return np.frombuffer(tables, np.uint8)


def _table_in(state: np.ndarray | None, place: int) -> PrefixCode | None:
    """The table in use (place 0) or the candidate (1), if the state is of tables and has one."""
    if state is None or state.dtype != np.uint8 or state.size not in (SERIAL_BYTES, 2 * SERIAL_BYTES):
        return None
    with contextlib.suppress(PayloadError):
        return code_of_bytes(state[place * SERIAL_BYTES : (place + 1) * SERIAL_BYTES].tobytes())
    return None


def _is_better(code: PrefixCode, other: PrefixCode, counts: np.ndarray) -> bool:
    return _num_bits(other, counts) - _num_bits(code, counts) > MIN_GAIN_BITS * float(counts.sum())


def _num_bits(code: PrefixCode, counts: np.ndarray) -> int:
    """Bits that these numbers of symbols take."""
    lengths = code.lengths.astype(np.int64)
    escaped = lengths[ESCAPE] + RAW_BITS
    lengths[(lengths == 0) | (np.arange(NUM_SYMBOLS) == ESCAPE)] = escaped
    return int((lengths * counts).sum())
