"""What one task graph synchronizes, and the messages that travel for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind

# Boundaries between ranges lie on multiples of this many elements, so that blocks of a codec and groups of random
# numbers (1,024 each) are not cut.
RANGE_ALIGNMENT = 1024


@dataclass(eq=False)
class TensorJob:
    """A range of one tensor, or a batch of small ones, as one flat tensor on the CPU.

    Attributes:
        name: parameter name, or a name made up for a batch.
        tensor: index in the agreed order of names.
        values: contiguous 1-D CPU tensor: the gradient before, the mean over ranks after.
        entry: how it travels.
        round: number of the submission it belongs to, the same on all ranks.
        step: synchronization step, for the context of encodes.
        offset: global element index of the first value.
        used: whether this rank's backward used the parameter.
        nonfinite: set where any rank's gradient, or the aggregate, was not finite; the same on all ranks.
        wait_loaded: blocks until the gradient stands in `values`, where it comes from a GPU.
        shape: of the whole tensor, for compressors that take it whole.
        place: among the tensors that travel in bundles, which says whose it is there under any bucket layout.
        aux: what contexts of its encodes have in `aux`, by range; None for compressors that need nothing.
    """

    name: str
    tensor: int
    values: torch.Tensor
    entry: PlanEntry
    round: int
    step: int
    offset: int = 0
    used: bool = True
    nonfinite: bool = False
    wait_loaded: Callable[[], None] = lambda: None
    shape: tuple[int, ...] | None = None
    place: int = 0
    aux: Callable[[ElementRange], Mapping[str, torch.Tensor]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def num_elements(self) -> int:
        return self.values.numel()

    def parts(self, num_parts: int) -> list[Chunk]:
        """The ranges it travels in: `num_parts`, or one where the compressor takes tensors whole."""
        return split(self.values.numel(), 1 if self.entry.compressor.requires_full_tensor else num_parts)

    def spec(self, part: Chunk) -> TensorSpec:
        shape = self.shape if self.entry.compressor.requires_full_tensor else None
        return TensorSpec((part.count,) if shape is None else shape, self.values.dtype)

    @property
    def whole_range(self) -> ElementRange:
        """Global elements of the item."""
        return ElementRange(self.offset, self.values.numel())

    def range(self, part: Chunk) -> ElementRange:
        """The global elements of a part: the key of its residual."""
        return ElementRange(self.offset + part.offset, part.count)


@dataclass(frozen=True)
class Chunk:
    """One range of an item: what one payload encodes.

    Attributes:
        index: number of the range in the item; the partition field of its frames.
        offset: first value, within the item.
        count: values.
    """

    index: int
    offset: int
    count: int

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.count)


class EncodedChunk(NamedTuple):
    """One encoded range on its way: made here, or arrived from `sender`."""

    kind: FrameKind
    flags: FrameFlags
    body: np.ndarray
    sender: int

    @property
    def used(self) -> bool:
        return bool(self.flags & FrameFlags.USED)

    @property
    def nonfinite(self) -> bool:
        return bool(self.flags & FrameFlags.NONFINITE)


def split(count: int, num_parts: int, alignment: int = RANGE_ALIGNMENT) -> list[Chunk]:
    """Cut `count` elements into `num_parts` ranges of nearly equal length; some may be empty.

    Depends on its arguments alone, so every rank cuts alike.
    """
    blocks = -(-count // alignment)
    edges = [min(count, blocks * part // num_parts * alignment) for part in range(num_parts + 1)]
    return [Chunk(index, start, end - start) for index, (start, end) in enumerate(itertools.pairwise(edges))]
