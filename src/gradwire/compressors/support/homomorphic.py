"""Base of `thc` and `uthc`: payloads of table indices, whose values add up as integers that decode to the sum.

A range is cut into blocks, which are rotated: signs flipped by the stream that all ranks share, and a Hadamard
transform, so that coordinates are near normal whatever the elements are. Coordinates are quantised, without bias
between the ends, to the values of a table whose scale all ranks share, found in a preliminary round. An aggregator
looks values up and adds; only where the sum is wanted is it lowered. The last lane counts the payloads that were added,
because lanes are centred by it, and ranks whose backward did not use a parameter send none.

Body: what all ranks share of each block, as float32, unless a preliminary round has; then the indices, packed as
`gradwire.kernels.blocks` says. Whole chunks of 1,024 indices stand by themselves, so that a packet can carry one.
"""
# Shapes: N elements of the range, P = N with the last block filled up, B elements a block, G blocks, W ranks

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import Reduction, Stat, options
from gradwire.compressors.base.array import ArrayCompressor, expect, expect_bytes, scratch
from gradwire.compressors.support.thc_choice import LANE_BITS, lane_for
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import SIGNS_A_WORD, Blocks, index_bytes, next_power, num_sign_words, padded_size
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

ROTATIONS = ("block", "full", "none")
MIN_BLOCK = 64
_LINE = 64
_MAX = float(np.finfo(np.float32).max)


class Coding(NamedTuple):
    """A table as kernels take it: its values, uint32[2^bits], and the bits of an index."""

    values: np.ndarray
    bits: int

    @property
    def granularity(self) -> int:
        """The largest value."""
        return int(self.values[-1])


class Grid(NamedTuple):
    """Where the values of a table lie in each block: float32[G] each; see the kernels."""

    units: np.ndarray
    lows: np.ndarray
    rates: np.ndarray
    factors: np.ndarray
    bases: np.ndarray


class Homomorphic(ArrayCompressor):
    """Payloads whose values add up; see the module."""

    summable = True
    needs_stats = True
    reductions: ClassVar[tuple[Reduction, ...]]

    def __init__(self, bits: int, block: int, rotate: str, lane_bits: int | None) -> None:
        self.bits = options.integer("bits", bits, 1, 8)
        self.block = options.integer("block", block, MIN_BLOCK, 1 << 20)
        if self.block & (self.block - 1):
            raise OptionError(f"Expected block to be a power of two, got {block}. Do: pass {next_power(self.block)}.")
        if rotate not in ROTATIONS:
            raise OptionError(f"Expected rotate to be one of {', '.join(ROTATIONS)}, got {rotate!r}. Do: choose one.")
        if lane_bits not in (None, *LANE_BITS):
            raise OptionError(f"Expected lane_bits to be 8, 16, 32 or None, got {lane_bits!r}. Do: leave it out.")
        self.rotate = rotate
        self.lane_bits = lane_bits

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"bits": self.bits, "block": self.block, "rotate": self.rotate, "lane_bits": self.lane_bits}

    def agreed(self, world_size: int) -> dict[str, Any]:
        """The table, by its bits, its largest value and a hash, and the lanes."""
        values, bits = coding = self.coding(world_size)
        digest = hashlib.blake2b(values.astype("<u4").tobytes(), digest_size=8).hexdigest()
        lanes = self.lane_dtype(world_size).name
        return {"bits": bits, "granularity": coding.granularity, "table": digest, "lanes": lanes}

    # -- what an algorithm says ------------------------------------------------------------------------------------

    @abstractmethod
    def coding(self, world_size: int) -> Coding:
        """The table for so many ranks. The same on all of them."""

    @abstractmethod
    def _sides(self, x: np.ndarray, blocks: Blocks, work: np.ndarray, scale: float) -> list[np.ndarray]:
        """What ranks must share of scale · x, float32[G] each; infinite where x is not finite."""

    @abstractmethod
    def _grid(self, sides: Sequence[np.ndarray], blocks: Blocks, granularity: int, scale: float) -> Grid:
        """The grid that shared values make."""

    @abstractmethod
    def _possible(self, sides: Sequence[np.ndarray]) -> bool:
        """Whether an encoder could have sent these."""

    # -- preliminary round -----------------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """What ranks must share of each block."""
        x = as_array(grad)
        blocks, work, _ = self._room(x.size, ctx)
        sides = self._sides(x, blocks, work, scale)
        return [Stat(values, reduction) for values, reduction in zip(sides, self.reductions, strict=True)]

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """A value a block."""
        return [(self._num_blocks(spec.numel), reduction) for reduction in self.reductions]

    # -- encode and decode -----------------------------------------------------------------------------------------

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """What is shared of each block, and the indices at the most bits that are chosen."""
        sides = 4 * len(self.reductions) * self._num_blocks(spec.numel)
        return sides + index_bytes(self._padded(spec.numel), self.bits)

    def _encode(
        self,
        x: np.ndarray,
        ctx: Context,
        *,
        scale: float = 1.0,
        largest: float | None = None,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> np.ndarray | None:
        blocks, work, _ = self._room(x.size, ctx)
        sides = self._given(stats, x.size) if stats else self._sides(x, blocks, work, scale)
        if not all(np.isfinite(values).all() for values in sides):
            return None
        values, bits = coding = self.coding(ctx.world_size)
        own = b"" if stats else b"".join(side.astype("<f4").tobytes() for side in sides)
        body = np.empty(len(own) + index_bytes(blocks.padded, bits), np.uint8)
        body[: len(own)] = np.frombuffer(own, np.uint8)
        grid = self._grid(sides, blocks, coding.granularity, scale)
        kernels.encode_indices(
            x, blocks, grid.units, grid.lows, grid.rates, values, bits, ctx.private_key, ctx.offset, work,
            body[len(own) :], grid.factors, grid.bases, residual,
        )  # fmt: skip
        return body

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        values, bits = coding = self.coding(ctx.world_size)
        sides, packed = self._parse(body, stats, out.size, bits)
        lane = np.dtype(np.uint8 if coding.granularity < 256 else np.uint16)
        blocks, work, spare = self._room(out.size, ctx, lane.itemsize)
        lanes = spare.view(lane)
        kernels.lift_indices(packed, bits, values, lanes)
        self._lower(lanes, 1, sides, blocks, coding.granularity, work, out, accumulate)

    def _parse(
        self, body: np.ndarray, stats: Sequence[np.ndarray], size: int, bits: int
    ) -> tuple[Sequence[np.ndarray], np.ndarray]:
        num_blocks, num_own = self._num_blocks(size), 0 if stats else len(self.reductions)
        num_packed = index_bytes(self._padded(size), bits)
        expect_bytes(body, 4 * num_own * num_blocks + num_packed, self.name)
        reader = Reader(body)
        sides = [reader.array(np.float32, num_blocks) for _ in range(num_own)]
        if stats:
            sides = self._given(stats, size)
        else:
            expect(self._possible(sides), "scales of blocks", "others", self.name)
        return sides, reader.array(np.uint8, num_packed)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def partial_lane_dtype(self, num_added: int, world_size: int) -> np.dtype:
        """The narrowest for so many, unless `lane_bits` says which."""
        return lane_for(num_added, self.lane_bound(world_size), self.lane_bits)

    def lane_bound(self, world_size: int) -> int:
        """The granularity."""
        return self.coding(world_size).granularity

    def num_lanes(self, spec: TensorSpec) -> int:
        """A lane for each index, and one that counts payloads."""
        return self._padded(spec.numel) + 1

    def lift(self, payload: Payload, ctx: Context, lanes: np.ndarray, accumulate: bool = False) -> np.ndarray:
        """Look up and write or add the values of a payload that was encoded with shared scales."""
        if payload.nonfinite:
            raise PayloadError("Expected values to add, got a payload that is marked as non-finite.")
        values, bits = self.coding(ctx.world_size)
        packed = self._expect_bytes(payload, index_bytes(lanes.size - 1, bits))
        kernels.lift_indices(packed, bits, values, lanes[:-1], accumulate)
        lanes[-1] = lanes[-1] + 1 if accumulate else 1
        return lanes

    def lower(
        self, lanes: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Centre the sums by the number of payloads in them, transform them back and scale them.

        Raises:
            PayloadError: lanes of more than `count` payloads.
        """
        num_added = int(lanes[-1])
        expect(num_added <= count, f"lanes of at most {count} payloads", num_added, self.name)
        return self.lower_blocks(lanes[:-1], num_added, ctx, stats, out)

    def lower_blocks(
        self,
        lanes: np.ndarray,
        num_added: int | np.ndarray,
        ctx: Context,
        stats: Sequence[np.ndarray],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """`lower` of lanes without their counter.

        Args:
            lanes: P sums.
            num_added: how many payloads they are of; or how many in each block, int[G].
            ctx: see `Context`.
            stats: the reduced values.
            out: float32[N], the sum.
        """
        target = as_array(out)
        blocks, work, _ = self._room(target.size, ctx)
        sides = self._given(stats, target.size)
        self._lower(lanes, num_added, sides, blocks, self.coding(ctx.world_size).granularity, work, target, False)
        return out

    def _lower(
        self, lanes: np.ndarray, num_added: int | np.ndarray, sides: Sequence[np.ndarray], blocks: Blocks,
        granularity: int, work: np.ndarray, out: np.ndarray, accumulate: bool,
    ) -> None:  # fmt: skip
        grid = self._grid(sides, blocks, granularity, 1.0)
        counts = np.broadcast_to(np.asarray(num_added, np.float64), blocks.num_blocks)
        halves, bases = narrowed(counts * granularity / 2), narrowed(counts * grid.bases)
        kernels.lower_blocks(lanes, blocks, halves, grid.factors, bases, work, out, accumulate)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _block(self, size: int) -> int:
        return max(MIN_BLOCK, next_power(size)) if self.rotate == "full" else self.block

    def _num_blocks(self, size: int) -> int:
        return -(-size // self._block(size))

    def _padded(self, size: int) -> int:
        return padded_size(size, self._block(size), self.rotate != "none")

    def _room(self, size: int, ctx: Context, lane_bytes: int = 0) -> tuple[Blocks, np.ndarray, np.ndarray]:
        """The blocks of a range, memory of this thread to compute in, and `lane_bytes` bytes for each coordinate."""
        rotated = self.rotate != "none"
        blocks = Blocks(size, self._block(size), rotated, _NO_SIGNS, ctx.offset % SIGNS_A_WORD)
        num_words = num_sign_words(blocks.padded) if rotated else 0
        sizes = [4 * num_words, 4 * blocks.work_size, lane_bytes * blocks.padded]
        memory, pieces = scratch(sum(map(_aligned, sizes))), []
        for num_bytes in sizes:
            pieces.append(memory[:num_bytes])
            memory = memory[_aligned(num_bytes) :]
        signs, work, lanes = pieces
        if rotated:
            blocks = blocks._replace(signs=signs.view(np.uint32))
            kernels.random32(ctx.shared_key, ctx.offset // SIGNS_A_WORD, blocks.signs)
        return blocks, work.view(np.float32), lanes

    def _given(self, stats: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
        num_blocks = self._num_blocks(size)
        if [entry.shape for entry in stats] != [(num_blocks,)] * len(self.reductions):
            raise ValueError(
                f"Expected {len(self.reductions)} entries of stats with {num_blocks} values, got shapes "
                f"{[entry.shape for entry in stats]}. Do: pass what `stats` gave, reduced over ranks."
            )
        return list(stats)


_NO_SIGNS = np.empty(0, np.uint32)


def spread(blocks: Blocks) -> np.ndarray:
    """By how much a rotation that is not normalised makes each block longer: float64[G]."""
    return np.sqrt(blocks.lengths()) if blocks.rotated else np.ones(blocks.num_blocks)


def narrowed(values: np.ndarray) -> np.ndarray:
    """As finite float32."""
    return np.asarray(np.clip(values, -_MAX, _MAX), np.float32)


@functools.lru_cache(maxsize=64)
def coding_of(values: tuple[int, ...], bits: int) -> Coding:
    """A table for the kernels."""
    return Coding(np.array(values, np.uint32), bits)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
