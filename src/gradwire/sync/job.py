"""What one task graph synchronizes, and the encoded chunks that travel for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind

# Chunks begin at multiples of this many elements, so that no block of a codec and no group of random numbers (1,024
# each) is cut.
RANGE_ALIGNMENT = 1024


@dataclass(eq=False)
class TensorJob:
    """A range of one tensor, or a group of small dense tensors, as one flat tensor on the CPU.

    Attributes:
        name: Parameter name, or a made-up name for a group.
        tensor: Index of the tensor in the agreed order of names.
        values: Contiguous 1-D CPU tensor: the gradient at first, the mean over ranks at the end.
        entry: Plan entry.
        round: Number of the submission, the same on all ranks.
        step: Synchronization step, for the context of encodes.
        offset: Global element index of the first value.
        used: Whether this rank's backward pass used the parameter.
        nonfinite: Whether the gradient of any rank, or the aggregate, was not finite. The same on all ranks.
        wait_loaded: Blocks until the gradient is in `values`, if it comes from a GPU.
        shape: Shape of the full tensor, for compressors with `requires_full_tensor`.
        aux: Returns `Context.aux` for a range; None if the compressor needs no optimizer.
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

    @property
    def full_range(self) -> ElementRange:
        """Global elements of the job."""
        return ElementRange(self.offset, self.values.numel())

    def chunks(self, num_chunks: int) -> list[Chunk]:
        """Return `num_chunks` chunks, or one if the compressor requires full tensors."""
        return split(self.values.numel(), 1 if self.entry.compressor.requires_full_tensor else num_chunks)

    def spec(self, chunk: Chunk) -> TensorSpec:
        shape = self.shape if self.entry.compressor.requires_full_tensor else None
        return TensorSpec((chunk.count,) if shape is None else shape, self.values.dtype)

    def range(self, chunk: Chunk) -> ElementRange:
        """Return the global elements of a chunk, by which its residual is stored."""
        return ElementRange(self.offset + chunk.offset, chunk.count)


@dataclass(frozen=True)
class Chunk:
    """One range of a job: what one payload encodes.

    Attributes:
        index: Index of the chunk in the job; the partition field of its frames.
        offset: Index of the first value within the job.
        count: Number of values.
    """

    index: int
    offset: int
    count: int

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.count)


class EncodedChunk(NamedTuple):
    """One encoded chunk, made here or received from `sender`."""

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


def group_name(names: Sequence[str]) -> str:
    """Return the name of a fusion group, for messages and metrics."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def split(count: int, num_chunks: int, alignment: int = RANGE_ALIGNMENT) -> list[Chunk]:
    """Split `count` elements into `num_chunks` chunks of nearly equal length. Some may be empty.

    Depends only on its arguments, so that all ranks split in the same way.
    """
    blocks = -(-count // alignment)
    edges = [min(count, blocks * index // num_chunks * alignment) for index in range(num_chunks + 1)]
    return [Chunk(index, start, end - start) for index, (start, end) in enumerate(itertools.pairwise(edges))]
