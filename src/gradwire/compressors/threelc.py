"""3LC: three values {-M, 0, M} per element, five of them in a byte, runs of zero bytes in one.

Biased; a contraction with δ ≥ s (2 - s) / N, so it needs error feedback.

1. Accumulate the input and the error of earlier steps (`residual_in`).
2. Quantize each element to -1, 0 or 1 in units of M.
3. Pack five of these into a byte (quartic encoding); dequantize, and keep the remaining error (steps a and b).
4. Shorten runs of zero bytes (zero-run encoding).

Body: M as float32, then the bytes of quartic encoding, shortened (option `zero_run`) by zero-run encoding. With option
`block`, for large tensors and several threads, each block is encoded by itself, with runs that do not cross blocks. If
they are shortened, the number of bytes of each block, as uint32, precedes them all.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3; the step numbers are those of its figure 3. Differences: M = 0
(all elements zero) is defined, and decodes to zeros. M is at most the largest float32, and is the largest magnitude
itself if s times that cannot be told from twice (subnormal numbers), so that the largest element is never rounded to
zero. The last byte is filled up with zeros instead of -1, so that it can be part of a run. The unit of compression is
what the caller passes, which has one M, and not always a tensor as in the paper: parameter servers cut parameters above
32,768 elements into chunks of rows, strategies between ranks cut tensors into ranges, and `block` cuts further.
"""
# Shapes: N = elements of the tensor or range, S = ceil(N/5), W = ranks, B = blocks

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from gradwire.compressors.base import options
from gradwire.compressors.base.array import ArrayCompressor, EncodeArguments, any_other, expect, scaled, scratch
from gradwire.compressors.base.contract import Compiled
from gradwire.compressors.base.registry import register
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.cpu.small import encode_ternary, sum_ternary
from gradwire.kernels.layout import ZERO_BYTE, half_of
from gradwire.wire.fields import Reader

T = TypeVar("T")
R = TypeVar("R")
_SCALE_BYTES = 4
_RUN_ELEMENTS = 70
_LARGEST = float(np.finfo(np.float32).max)


@register
class ThreeLC(ArrayCompressor):
    """3LC: three values per element, five of them in a byte, runs of zeros in one.

    Args:
        sparsity: Sparsity multiplier s, 1 <= s < 2; a larger one sends fewer elements.
        zero_run: Whether zero-run encoding follows.
        block: Elements of a block that is encoded by itself, a multiple of 70 (a run of fourteen bytes); 0 for one
            block.
    """

    name: ClassVar[str] = "threelc"
    unique_encoding = True

    def __init__(self, sparsity: float = 1.0, zero_run: bool = True, block: int = 0) -> None:
        self.sparsity = options.real("sparsity", sparsity, 1.0, 2.0, high_open=True)
        self.zero_run = options.flag("zero_run", zero_run)
        self.block = options.integer("block", block, 0, 1 << 30)
        if self.block % _RUN_ELEMENTS:
            raise OptionError(
                f"block must be a multiple of {_RUN_ELEMENTS} elements, not {block}. Pass 0 for one block, or for "
                f"example {1000 * _RUN_ELEMENTS}."
            )

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"sparsity": self.sparsity, "zero_run": self.zero_run, "block": self.block}

    def contraction(self, spec: TensorSpec) -> float:
        """The error of an element is at most the element itself; that of the largest is (s - 1) times the element."""
        return self.sparsity * (2 - self.sparsity) / max(1, spec.numel)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Size without any run."""
        return _SCALE_BYTES + self._table_bytes(spec.numel) + _packed_bytes(spec.numel)

    def compiled(self) -> Compiled | None:
        """Functions for one block."""
        if self.block:
            return None
        static = np.array([self.sparsity, self.zero_run], np.float64)
        return Compiled(encode_ternary, sum_ternary, lambda size, step: static, lambda size, n: n * _packed_bytes(size))

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        # Step 1, the accumulation of the input into the buffer, is done: x is the compensated gradient.
        M = self._scale(float(kernels.abs_max(x)) if args.abs_max is None else args.abs_max)
        sent_M = scaled(M, float(np.float32(args.scale)))  # as in a fusion group
        if not math.isfinite(sent_M):
            return None
        head = _SCALE_BYTES + self._table_bytes(x.size)
        body = buffers.empty(head + _packed_bytes(x.size))
        body[:_SCALE_BYTES].view("<f4")[0] = sent_M
        packed = body[head:]
        quartic = scratch(packed.size) if self.zero_run else packed

        def encode(block: _Block) -> int:
            # Steps 2 and 3, and steps a and b in the same sweep: quantize, pack, dequantize, remaining error.
            left = None if args.residual_out is None else args.residual_out[block.elements]
            kernels.pack_ternary(x[block.elements], M, quartic[block.bytes_], left)
            if not self.zero_run:
                return block.num_bytes
            return int(kernels.zero_run_encode(quartic[block.bytes_], packed[block.bytes_]))  # step 4

        blocks = self._blocks(x.size)
        lengths = _each(encode, blocks)
        if head > _SCALE_BYTES:
            body[_SCALE_BYTES:head].view("<u4")[:] = lengths
        end = head + lengths[0] if lengths else head
        for block, length in zip(blocks[1:], lengths[1:]):
            body[end : end + length] = packed[block.bytes_][:length]
            end += length
        return body[:end]

    def _scale(self, largest: float) -> float:
        """M, from the largest magnitude; NaN from NaN."""
        M = float(np.float32(min(largest * self.sparsity, _LARGEST)))
        return M if largest > half_of(M) else largest

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        M, quartic = self._parse(body, out.size, scratch(self._expanded_bytes(out.size)))

        def decode(block: _Block) -> bool:
            return kernels.unpack_ternary(quartic[block.bytes_], M, out[block.elements], accumulate)

        _expect_canonical(_each(decode, self._blocks(out.size)))

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        size = self._expanded_bytes(out.size)
        buffers = scratch(len(bodies) * size).reshape(len(bodies), size)
        parsed = [self._parse(body, out.size, buffer) for body, buffer in zip(bodies, buffers, strict=True)]
        scales = np.array([M for M, _ in parsed], np.float32)

        def decode(block: _Block) -> bool:
            packed = [quartic[block.bytes_] for _, quartic in parsed]
            return kernels.unpack_ternary_sum(packed, scales, out[block.elements])

        _expect_canonical(_each(decode, self._blocks(out.size)))

    def _parse(self, body: np.ndarray, size: int, buffer: np.ndarray) -> tuple[float, np.ndarray]:
        """M and the bytes of quartic encoding, not yet checked one by one. Expands them into `buffer` if needed."""
        reader = Reader(body)
        M = reader.f32(finite=True)
        if self.zero_run:
            quartic = buffer
            blocks = self._blocks(size)
            tabled = self._table_bytes(size) > 0
            lengths = reader.array(np.uint32, len(blocks)).tolist() if tabled else [reader.remaining] * len(blocks)
            runs = [reader.take(length) for length in lengths]
            reader.end()

            def decode(source: tuple[_Block, np.ndarray]) -> bool:
                block, run = source
                return kernels.zero_run_decode(run, quartic[block.bytes_]) == block.num_bytes

            whole = all(_each(decode, list(zip(blocks, runs))))
            expect(whole, f"zero-run encoding of {quartic.size} bytes", "something else", self.name)
        else:
            quartic = reader.take(_packed_bytes(size))
            reader.end()
        expect(not np.signbit(M), "M of at least 0", M, self.name)
        expect(
            (M > 0) == any_other(quartic, ZERO_BYTE),
            "M above 0 exactly where an element is not 0",
            M,
            self.name,
        )
        return M, quartic

    def _blocks(self, size: int) -> list[_Block]:
        """Blocks of a tensor: at least one, of which the last may be shorter."""
        block = self.block or max(1, size)
        return [_Block(start, min(block, size - start)) for start in range(0, max(1, size), block)]

    def _expanded_bytes(self, size: int) -> int:
        """Bytes of the buffer that zero-run decoding needs."""
        return _packed_bytes(size) if self.zero_run else 0

    def _table_bytes(self, size: int) -> int:
        blocks = len(self._blocks(size)) if self.block else 1
        return 4 * blocks if self.zero_run and blocks > 1 else 0


@dataclass(frozen=True)
class _Block:
    """Elements that are encoded by themselves, and the place of their bytes without any run."""

    start: int
    count: int

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def num_bytes(self) -> int:
        return _packed_bytes(self.count)

    @property
    def bytes_(self) -> slice:
        return slice(self.start // 5, self.start // 5 + self.num_bytes)


def _each(task: Callable[[T], R], items: list[T]) -> list[R]:
    """Run a task for each item, on as many threads as torch may use."""
    threads = min(len(items), torch.get_num_threads())
    if threads < 2:
        return [task(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, items))


def _expect_canonical(bytes_are: Iterable[bool]) -> None:
    """Raise `PayloadError` unless the bytes of each block are those that the encoder writes."""
    expect(all(bytes_are), "bytes below 243 and padding of zeros", "others", ThreeLC.name)


def _packed_bytes(size: int) -> int:
    return -(-size // 5)
