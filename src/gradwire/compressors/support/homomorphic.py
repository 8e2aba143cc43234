"""Base of `thc` and `uthc`: payloads of table indices, whose values add up as integers and decode to the sum.

A range is cut into blocks, and each block is rotated: signs are flipped by the shared random stream, and a Hadamard
transform follows, so that coordinates are nearly normal whatever the elements are. Coordinates are rounded without bias
to the values of a table. The scale of the table is shared by all ranks, and found in a preliminary round. An aggregator
looks values up and adds them; only the sum is transformed back.

The last element of an accumulator counts payloads, because sums are centered by that number, and a rank whose backward
pass did not use a parameter sends none.

Sums are exact until decoding scales them. Decoding subtracts g/2 for each payload, in float32. The values of a block
are then all integers, or all halves of odd integers. The transform adds up to B of them, an even number, so it has
integers of up to W g B/2, and float32 has all integers up to 2^24. A last block of one element has no sums, and float32
has all halves up to 2^23. A plan with a larger W g B/2 (W g without rotation) is refused when ranks agree on it. With
`rotate="full"`, where B follows the length of the range, nothing is refused, and larger sums may be rounded. All ranks
get the same bits in any case, because additions have one order.

With `rotate="full"`, blocks are as long as padding of at most a sixteenth of the range (or 31 elements) allows: at most
16 blocks. One block for all, padded to the next power of two, could double the bytes.

Body: block statistics as float32, unless they were reduced in a preliminary round; then the indices, packed as
`gradwire.kernels.blocks` says. Chunks of 1,024 indices are packed by themselves, so that a packet can carry one.
"""
# Shapes: N elements of the range, P = N with the last block filled up, B elements of a block, G blocks, W ranks;
# g = granularity, the largest value of the table

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import LookupCompressor, LookupTable, Reduction, Stat, options
from gradwire.compressors.base.array import ArrayCompressor, EncodeArguments, expect, expect_bytes, scratch
from gradwire.compressors.support.thc_choice import ACCUMULATOR_BITS, accumulator_for
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import SIGNS_A_WORD, BlockLayout, index_bytes, next_power, num_sign_words, padded_size
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

ROTATIONS = ("block", "full", "none")
MIN_BLOCK = 64
_MAX_EXACT = 1 << 24  # float32 represents all integers up to here
_PADDING_SHARE = 16  # rotate="full" pads a range by at most a sixteenth
_LINE = 64
_MAX = float(np.finfo(np.float32).max)


class Grid(NamedTuple):
    """Position of the table's values in each block: float32[G] each; see the kernels."""

    units: np.ndarray
    lows: np.ndarray
    rates: np.ndarray
    factors: np.ndarray
    bases: np.ndarray


class Homomorphic(ArrayCompressor, LookupCompressor):
    """A compressor whose payloads add up as table values; see the module."""

    reductions: ClassVar[tuple[Reduction, ...]]

    def __init__(self, bits: int, block: int, rotate: str, accumulator_bits: int | None) -> None:
        self.bits = options.integer("bits", bits, 1, 8)
        self.block = options.integer("block", block, MIN_BLOCK, 1 << 20)
        if self.block & (self.block - 1):
            raise OptionError(f"block must be a power of two, not {block}. Pass {next_power(self.block)}.")
        if rotate not in ROTATIONS:
            raise OptionError(f"rotate must be one of {', '.join(ROTATIONS)}, not {rotate!r}.")
        if accumulator_bits not in (None, *ACCUMULATOR_BITS):
            raise OptionError(f"accumulator_bits must be 8, 16, 32 or None, not {accumulator_bits!r}. Leave it out.")
        self.rotate = rotate
        self.range_alignment = self.block if self.has_independent_blocks else 1
        self.accumulator_bits = accumulator_bits

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        bits = self.accumulator_bits
        return {"bits": self.bits, "block": self.block, "rotate": self.rotate, "accumulator_bits": bits}

    def derived_config(self, world_size: int) -> dict[str, Any]:
        """Bits, largest value and hash of the table, and the type of the accumulator.

        Raises:
            OptionError: Sums over all ranks would be rounded; see the module.
        """
        self._check_exact(world_size)
        values, bits = table = self.lookup_table(world_size)
        digest = hashlib.blake2b(values.astype("<u4").tobytes(), digest_size=8).hexdigest()
        accumulator = self.accumulator_dtype(world_size).name
        return {"bits": bits, "granularity": table.granularity, "table": digest, "accumulator": accumulator}

    @property
    def has_independent_blocks(self) -> bool:
        """True unless `rotate` is "full", where blocks depend on the length of the range."""
        return self.rotate != "full"

    # -- what an algorithm implements ------------------------------------------------------------------------------

    @abstractmethod
    def _block_stats(self, x: np.ndarray, blocks: BlockLayout, buffer: np.ndarray, scale: float) -> list[np.ndarray]:
        """Statistics of scale · x that ranks reduce, float32[G] each; infinite if x is not finite."""

    @abstractmethod
    def _grid(self, stats: Sequence[np.ndarray], blocks: BlockLayout, world_size: int, scale: float) -> Grid:
        """Grid of reduced statistics, for the table of this number of ranks."""

    @abstractmethod
    def _are_valid(self, stats: Sequence[np.ndarray]) -> bool:
        """Whether an encoder could have sent these statistics."""

    # -- preliminary round -----------------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """Statistics of each block."""
        x = as_array(grad)
        blocks, buffer, _ = self._buffers(x.size, ctx)
        found = self._block_stats(x, blocks, buffer, scale)
        return [Stat(values, reduction) for values, reduction in zip(found, self.reductions, strict=True)]

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """One value per block."""
        return [(self._num_blocks(spec.numel), reduction) for reduction in self.reductions]

    # -- encode and decode -----------------------------------------------------------------------------------------

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Statistics, and indices of `bits` bits."""
        stats_bytes = 4 * len(self.reductions) * self._num_blocks(spec.numel)
        return stats_bytes + index_bytes(self._padded(spec.numel), self.bits)

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        blocks, buffer, _ = self._buffers(x.size, ctx)
        stats, scale = args.stats, args.scale
        shared: Sequence[np.ndarray]
        if stats:
            shared = self._check_stats(stats, TensorSpec((x.size,)))
        else:
            shared = self._block_stats(x, blocks, buffer, scale)
        if not all(np.isfinite(values).all() for values in shared):
            return None
        values, bits = self.lookup_table(ctx.world_size)
        own = b"" if stats else b"".join(each.astype("<f4").tobytes() for each in shared)
        body = buffers.empty(len(own) + index_bytes(blocks.padded, bits))
        body[: len(own)] = np.frombuffer(own, np.uint8)
        grid = self._grid(shared, blocks, ctx.world_size, scale)
        kernels.encode_indices(
            x, blocks, grid.units, grid.lows, grid.rates, values, bits, ctx.private_key, ctx.offset, buffer,
            body[len(own) :], grid.factors, grid.bases, args.residual_out,
        )  # fmt: skip
        return body

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        values, bits = table = self.lookup_table(ctx.world_size)
        shared, packed = self._parse(body, stats, out.size, bits)
        dtype = np.dtype(np.uint8 if table.granularity < 256 else np.uint16)
        blocks, buffer, spare = self._buffers(out.size, ctx, dtype.itemsize)
        looked_up = spare.view(dtype)
        kernels.lookup_indices(packed, bits, values, looked_up)
        self._finalize(looked_up, 1, shared, blocks, ctx.world_size, buffer, out, accumulate)

    def _parse(
        self, body: np.ndarray, stats: Sequence[np.ndarray], size: int, bits: int
    ) -> tuple[Sequence[np.ndarray], np.ndarray]:
        num_blocks, num_own = self._num_blocks(size), 0 if stats else len(self.reductions)
        num_packed = index_bytes(self._padded(size), bits)
        expect_bytes(body, 4 * num_own * num_blocks + num_packed, self.name)
        reader = Reader(body)
        own = [reader.array(np.float32, num_blocks) for _ in range(num_own)]
        packed = reader.array(np.uint8, num_packed)
        if stats:
            return self._check_stats(stats, TensorSpec((size,))), packed
        expect(self._are_valid(own), "scales of blocks", "others", self.name)
        return own, packed

    # -- accumulators ----------------------------------------------------------------------------------------------

    def accumulator_dtype(self, world_size: int, num_payloads: int | None = None) -> np.dtype:
        """The narrowest, unless `accumulator_bits` names one."""
        count = world_size if num_payloads is None else num_payloads
        return accumulator_for(count, self.max_contribution(world_size), self.accumulator_bits)

    def max_contribution(self, world_size: int) -> int:
        """Granularity of the table."""
        return self.lookup_table(world_size).granularity

    def accumulator_size(self, spec: TensorSpec) -> int:
        """One integer per index, and one that counts payloads."""
        return self._padded(spec.numel) + 1

    def accumulate(self, payload: Payload, ctx: Context, accumulator: np.ndarray) -> None:
        """Look up and add the values of a payload that was encoded with reduced statistics."""
        values, bits = self.lookup_table(ctx.world_size)
        packed = self._expect_summable(payload, index_bytes(accumulator.size - 1, bits))
        kernels.lookup_indices(packed, bits, values, accumulator[:-1], True)
        accumulator[-1] += 1

    def finalize(
        self, accumulator: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Center the sums by their number of payloads, transform them back, and scale them.

        Raises:
            PayloadError: The accumulator holds more than `count` payloads.
        """
        num_added = int(accumulator[-1])
        expect(num_added <= count, f"a sum of at most {count} payloads", num_added, self.name)
        return self.finalize_blocks(accumulator[:-1], num_added, ctx, stats, out)

    def finalize_blocks(
        self,
        sums: np.ndarray,
        num_added: int | np.ndarray,
        ctx: Context,
        stats: Sequence[np.ndarray],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Like `finalize`, for sums without their counter."""
        target = as_array(out)
        blocks, buffer, _ = self._buffers(target.size, ctx)
        shared = self._check_stats(stats, TensorSpec((target.size,)))
        self._finalize(sums, num_added, shared, blocks, ctx.world_size, buffer, target, False)
        return out

    def _finalize(
        self, sums: np.ndarray, num_added: int | np.ndarray, stats: Sequence[np.ndarray], blocks: BlockLayout,
        world_size: int, buffer: np.ndarray, out: np.ndarray, accumulate: bool,
    ) -> None:  # fmt: skip
        grid = self._grid(stats, blocks, world_size, 1.0)
        counts = np.broadcast_to(np.asarray(num_added, np.float64), blocks.num_blocks)
        halves, bases = narrowed(counts * self.max_contribution(world_size) / 2), narrowed(counts * grid.bases)
        kernels.finalize_blocks(sums, blocks, halves, grid.factors, bases, buffer, out, accumulate)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _check_exact(self, world_size: int) -> None:
        """Raise if float32 could round a sum of all ranks; see the module."""
        if self.rotate == "full":
            return
        halves, granularity = self.block // 2 if self.rotate == "block" else 1, self.max_contribution(world_size)
        if world_size * granularity * halves > _MAX_EXACT:
            block = 2 * _MAX_EXACT // (world_size * granularity)
            smaller = f"block={1 << block.bit_length() - 1}, " if halves > 1 and block >= MIN_BLOCK else ""
            raise OptionError(
                f"{self!r} does not add up exactly on {world_size} ranks: {world_size} · {granularity} (granularity) · "
                f"{halves} (half of the block) exceeds 2^24, the integers of float32. Pass {smaller}a table with a "
                f"granularity of at most {_MAX_EXACT // (halves * world_size)}, or use fewer ranks."
            )

    def _block(self, size: int) -> int:
        """B of a range."""
        if self.rotate != "full":
            return self.block
        block = max(MIN_BLOCK, next_power(size))
        while block > MIN_BLOCK and padded_size(size, block, True) - size > size // _PADDING_SHARE:
            block //= 2
        return block

    def _num_blocks(self, size: int) -> int:
        return -(-size // self._block(size))

    def _padded(self, size: int) -> int:
        return padded_size(size, self._block(size), self.rotate != "none")

    def _buffers(self, size: int, ctx: Context, value_bytes: int = 0) -> tuple[BlockLayout, np.ndarray, np.ndarray]:
        """Blocks of a range, a buffer for the transform, and `value_bytes` bytes per coordinate, in scratch memory."""
        rotated = self.rotate != "none"
        blocks = BlockLayout(size, self._block(size), rotated, _NO_SIGNS, ctx.offset % SIGNS_A_WORD)
        num_words = num_sign_words(blocks.padded) if rotated else 0
        sizes = [4 * num_words, 4 * blocks.work_size, value_bytes * blocks.padded]
        memory, buffers = scratch(sum(map(_aligned, sizes))), []
        for num_bytes in sizes:
            buffers.append(memory[:num_bytes])
            memory = memory[_aligned(num_bytes) :]
        signs, buffer, values = buffers
        if rotated:
            blocks = blocks._replace(signs=signs.view(np.uint32))
            kernels.random32(ctx.shared_key, ctx.offset // SIGNS_A_WORD, blocks.signs)
        return blocks, buffer.view(np.float32), values


_NO_SIGNS = np.empty(0, np.uint32)


def spread(blocks: BlockLayout) -> np.ndarray:
    """Factor by which a rotation without normalization lengthens each block: float64[G]."""
    return np.sqrt(blocks.lengths()) if blocks.rotated else np.ones(blocks.num_blocks)


def narrowed(values: np.ndarray) -> np.ndarray:
    """Finite float32 values."""
    return np.asarray(np.clip(values, -_MAX, _MAX), np.float32)


@functools.lru_cache(maxsize=64)
def table_of(values: tuple[int, ...], bits: int) -> LookupTable:
    """A table for the kernels."""
    return LookupTable(np.array(values, np.uint32), bits)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
