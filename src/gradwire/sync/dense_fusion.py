"""Fusion of small dense tensors: tensors of several submissions share a message, unchanged or cast to 16 bits.

The cost of a graph, a task and a frame is paid once for many tensors. A group is about `DENSE_FUSION_BYTES` of tensors
whose plan entries fit together, in backward order. It does not depend on the buckets. It is sent when all of its
tensors are there, or earlier, with those that are, if a submission asks for that.

To compressor and strategy, a group is one flat tensor. It keeps no residuals, because none of its compressors needs
any. Residuals of its tensors from another plan, or from a loaded state, are added to the next group.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4: batches by a size threshold. Differences: there is no coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.core.errors import SyncError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals.transaction import ResidualKey, Residuals
from gradwire.sync.job import group_name
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.staging import Staging
from gradwire.sync.submission import GradientSlice, Submission

DENSE_FUSION_FLAG = 1 << 31  # set in the tensor id of a group; the other bits are the id of its first tensor
# Approximate bytes of the gradients in a group; half of that on the wire if they are cast. A group costs each of four
# ranks 1.5 ms of processor time, and a few bytes need not wait for the end of the backward pass.
DENSE_FUSION_BYTES = 1 << 17


class DenseFusionKey(NamedTuple):
    """What the tensors of a group have in common."""

    dtype: torch.dtype
    compressor: str
    strategy: str


GroupId = tuple[DenseFusionKey, int]
"""Key of a group, and its number among the groups with that key."""


def dense_fusion_entry(entry: PlanEntry) -> PlanEntry:
    """Return the plan entry of a group from that of its first tensor."""
    return PlanEntry(entry.compressor, entry.strategy, batched=True)


def group_ids(tensors: Iterable[tuple[str, PlanEntry, TensorSpec]]) -> dict[str, GroupId]:
    """Return the group of each tensor whose entry is `batched`. Pass the tensors in backward order."""
    found: dict[str, GroupId] = {}
    filled_bytes: Counter[DenseFusionKey] = Counter()
    for name, entry, spec in tensors:
        if entry.batched:
            key = DenseFusionKey(spec.dtype, repr(entry.compressor), entry.strategy)
            found[name] = key, filled_bytes[key] // DENSE_FUSION_BYTES
            filled_bytes[key] += spec.nbytes
    return found


@dataclass(frozen=True)
class PendingSlice:
    """A gradient slice that waits for the rest of its group.

    Attributes:
        tensor: Index in the agreed order of names.
        gradient: Submitted slice.
        submission: Submission of the slice.
    """

    tensor: int
    gradient: GradientSlice
    submission: Submission


class DenseFusionGroup:
    """Small tensors that are synchronized as one.

    Args:
        members: Members in the order of names.
        residuals: Residuals of this rank; those of the members are added to their gradients.
        world_size: Number of ranks.
    """

    def __init__(self, members: list[PendingSlice], residuals: Residuals, world_size: int) -> None:
        gradients = [member.gradient for member in members]
        self.tensor = members[0].tensor | DENSE_FUSION_FLAG
        self.name = group_name([gradient.name for gradient in gradients])
        self.staging = Staging([gradient.tensor for gradient in gradients])
        self.values = self.staging.concatenate(range(len(members)))
        self._members = members
        pieces = torch.split(self.values, [gradient.tensor.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces):
            if gradient.used and residuals.holds_after_pruning(gradient.name):
                self.staging.wait_loaded()
                _flush_residual(gradient, piece, residuals, world_size)

    def arrived(self) -> None:
        """Copy the mean, which `values` holds now, to the members."""
        self.staging.store()
        for member in self._members:
            member.submission.arrived(self.staging)

    def failed(self, error: SyncError) -> None:
        """Fail the submissions of the members."""
        for member in self._members:
            member.submission.failed(error)


def _flush_residual(gradient: GradientSlice, values: torch.Tensor, residuals: Residuals, world_size: int) -> None:
    """Add the residual of a tensor to its gradient. What 16 bits cannot hold becomes the new residual."""
    key = ResidualKey(gradient.name, ElementRange(gradient.offset, values.numel()))
    left = residuals.source(key)
    if left is None:
        return
    # Residuals are in units of the mean; the gradient is not scaled yet.
    total = values.to(torch.promote_types(values.dtype, torch.float32)) + world_size * torch.from_numpy(left)
    values.copy_(total)
    torch.from_numpy(residuals.stage(key)).copy_((total - values) / world_size)


class PendingSlices:
    """The gradient slices that wait for the rest of their groups."""

    def __init__(self) -> None:
        self._pending: list[PendingSlice] = []

    def add(self, pending: PendingSlice) -> None:
        self._pending.append(pending)

    def take(self, ids: Mapping[str, GroupId], complete: bool) -> list[list[PendingSlice]]:
        """Remove and return groups in backward order, each with its members in the order of names.

        Args:
            ids: Group of each tensor, including tensors that are not pending.
            complete: Whether to take only groups of which all tensors are pending.
        """
        if not self._pending:
            return []
        groups: dict[GroupId, list[PendingSlice]] = {}
        for pending in sorted(self._pending, key=lambda pending: pending.tensor):
            groups.setdefault(ids[pending.gradient.name], []).append(pending)
        sizes = Counter(ids.values())
        ready = [found for found, group in groups.items() if not complete or len(group) == sizes[found]]
        self._pending = [pending for pending in self._pending if ids[pending.gradient.name] not in ready]
        return [groups[found] for found in sorted(ready, key=lambda found: found[1])]
