"""Jobs: what is synchronized together, in one step (`TensorJob`) and in all of them (`TensorLayout`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from gradwire.compressors.base.registry import code
from gradwire.core.spec import ELEMENT_TYPES, ElementRange, TensorSpec
from gradwire.residuals import policies
from gradwire.residuals.policies import Policy
from gradwire.sync.chunk import Chunk
from gradwire.sync.operations import FrameFields, Operations
from gradwire.sync.optimizer_view import OptimizerView
from gradwire.sync.plan_entry import PlanEntry


class TensorLayout:
    """What stays the same from step to step of a range of one tensor, or of a dense group as one flat tensor.

    Args:
        name: Parameter name, or the name of a group.
        tensor: Index of the tensor in the agreed order of names.
        entry: Plan entry.
        dtype: Element type.
        count: Number of values.
        offset: Global element index of the first value.
        shape: Shape of the full tensor, for compressors with `requires_full_tensor`.
        index: Index in the submission.
        rotation: Rank that owns the first range, modulo the number of ranks. The same whatever the buckets are.

    Attributes:
        operations: How it is synchronized; set once all of the above is known.
        detail: Event detail of its submissions.
        names: Names of the tensors that it consists of: of one, or of the members of a group.
        counts: Number of values of each of these.
        members: Hash of the members of a group; 0 for a single tensor.
        flushes: Whether this rank holds residuals of it that the plan would not send.
    """

    operations: Operations

    def __init__(
        self,
        name: str,
        tensor: int,
        entry: PlanEntry,
        dtype: torch.dtype,
        count: int,
        offset: int = 0,
        shape: tuple[int, ...] | None = None,
        index: int = 0,
        rotation: int = 0,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.entry = entry
        self.dtype = dtype
        self.count = count
        self.offset = offset
        self.shape = shape if entry.compressor.requires_full_tensor else None
        self.index = index
        self.rotation = rotation
        self.names: Sequence[str] = [name]
        self.counts: Sequence[int] = [count]
        self.members = 0
        self.flushes = False
        self.detail = job_detail(entry, count, self.names)

    @cached_property
    def fields(self) -> FrameFields:
        """Header fields of its frames."""
        compressor, dtype = code(self.entry.compressor.name), ELEMENT_TYPES[self.dtype]
        return FrameFields(self.tensor, self.offset, compressor, dtype, self.members)

    @property
    def policy(self) -> Policy:
        """How its residuals are used."""
        return policies.FLUSH if self.flushes else policies.get(self.entry.feedback)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def range(self) -> ElementRange:
        """Global elements."""
        return ElementRange(self.offset, self.count)

    def chunks(self, shares: int) -> list[Chunk]:
        """Return the ranges of the plan entry, or one if the compressor requires full tensors. Some may be empty."""
        return self.entry.chunks(self.count, shares)

    def chunk_range(self, chunk: Chunk) -> ElementRange:
        """Return the global elements of a chunk, by which its residual is stored."""
        return ElementRange(self.offset + chunk.offset, chunk.count)

    def spec(self, chunk: Chunk) -> TensorSpec:
        return TensorSpec((chunk.count,) if self.shape is None else self.shape, self.dtype)


class TensorJob:
    """A `TensorLayout` in one step.

    Args:
        layout: What stays the same.
        values: Contiguous 1-D CPU tensor: the gradient at first, the mean over ranks at the end.
        round: Number of the job, the same on all ranks.
        step: Synchronization step, for the context of encodes.
        used: Whether this rank's backward pass used the parameter.
        aux: Gives `Context.aux`; None if the compressor needs no optimizer.

    Attributes:
        nonfinite: Whether the gradient of any rank, or the aggregate, was not finite. The same on all ranks.
        mismatch: Whether ranks turned out to hold different optimizer state, so that the mean is NaN. The same on all
            ranks.
    """

    def __init__(
        self,
        layout: TensorLayout,
        values: torch.Tensor,
        round: int,
        step: int,
        used: bool = True,
        aux: OptimizerView | None = None,
    ) -> None:
        self.layout = layout
        self.values = values
        self.round = round
        self.step = step
        self.used = used
        self.aux = aux
        self.nonfinite = False
        self.mismatch = False

    @property
    def pieces(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Its tensors by name."""
        pieces = torch.split(self.values, list(self.layout.counts))
        return zip(self.layout.names, pieces, strict=True)


def nonfinite_names(pieces: Iterable[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """Return the names of the tensors whose means are not finite, out of those of a job that has marked some."""
    pieces = list(pieces)
    found = frozenset(name for name, mean in pieces if not bool(torch.isfinite(mean).all()))
    return found or frozenset(name for name, _ in pieces)


def group_name(names: Sequence[str]) -> str:
    """Return the name of a fusion group, for messages and metrics."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def job_detail(entry: PlanEntry, count: int, names: Sequence[str]) -> dict[str, Any]:
    """Return the event detail of submissions of a job."""
    return {"method": f"{entry.compressor!r} {entry.strategy}", "elements": count, "members": names}
