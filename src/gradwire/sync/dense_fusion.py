"""Batches: small tensors of several submissions in one message, as they are or cast to 16 bits.

What a graph, a task and a frame cost is paid once for many tensors. A batch is about `BATCH_BYTES` of tensors with like
plan entries, in the order of backward and the same under any bucket layout. It travels when all of it is there, or with
what there is when a submission asks for that.

A batch is one flat tensor to compressor and strategy. It keeps no residuals, as nothing that it may go by needs any;
what another plan, or a state that was loaded, has left in those of its tensors goes out with the next batch.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4, batches by a size threshold. Differences: nobody coordinates them.
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
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.staging import Staging
from gradwire.sync.submission import GradientSlice, Submission

BATCH_FLAG = 1 << 31  # set in the tensor id of a batch; the rest is the id of its first tensor
# Of gradients in a batch, about; half of that on the link where they are cast. A batch costs each of four ranks 1.5 ms
# of its processor, and so few bytes need not wait for the end of backward.
BATCH_BYTES = 1 << 17


class DenseFusionKey(NamedTuple):
    """What the tensors of a batch have in common."""

    dtype: torch.dtype
    compressor: str
    strategy: str

    @classmethod
    def of(cls, entry: PlanEntry, spec: TensorSpec) -> DenseFusionKey:
        """The kind of batch of a tensor."""
        return cls(spec.dtype, repr(entry.compressor), entry.strategy)


Place = tuple[DenseFusionKey, int]  # which of the batches of a kind


def batch_entry(entry: PlanEntry) -> PlanEntry:
    """How a batch travels, where `entry` is that of its first tensor."""
    return PlanEntry(entry.compressor, entry.strategy, batched=True)


def places(tensors: Iterable[tuple[str, PlanEntry, TensorSpec]]) -> dict[str, Place]:
    """The batch of each batched tensor, given in the order of backward."""
    found: dict[str, Place] = {}
    filled: Counter[DenseFusionKey] = Counter()
    for name, entry, spec in tensors:
        if entry.batched:
            kind = DenseFusionKey.of(entry, spec)
            found[name] = kind, filled[kind] // BATCH_BYTES
            filled[kind] += spec.nbytes
    return found


@dataclass(frozen=True)
class PendingSlice:
    """A shard that waits for others to travel with.

    Attributes:
        tensor: index in the agreed order of names.
        shard: what was submitted.
        submission: where it was.
    """

    tensor: int
    shard: GradientSlice
    submission: Submission


class DenseFusionGroup:
    """Small tensors that travel as one.

    Args:
        members: in the order of names.
        residuals: where something may be left of them.
        world_size: ranks of the group.
    """

    def __init__(self, members: list[PendingSlice], residuals: Residuals, world_size: int) -> None:
        first = members[0]
        self.tensor = first.tensor | BATCH_FLAG
        self.name = first.shard.name if len(members) == 1 else f"{first.shard.name} and {len(members) - 1} more"
        self.staging = Staging([held.shard.tensor for held in members])
        self.values = self.staging.batch(range(len(members)))
        self._members = members
        pieces = torch.split(self.values, [held.shard.tensor.numel() for held in members])
        for held, piece in zip(members, pieces):
            if held.shard.used and residuals.holds(held.shard.name):
                self.staging.wait_loaded()
                _give_out(held.shard, piece, residuals, world_size)

    def arrived(self) -> None:
        """The mean stands in `values`."""
        self.staging.store()
        for held in self._members:
            held.submission.arrived(self.staging)

    def failed(self, error: SyncError) -> None:
        """The mean will not come."""
        for held in self._members:
            held.submission.failed(error)


def _give_out(shard: GradientSlice, values: torch.Tensor, residuals: Residuals, world_size: int) -> None:
    """Add what is left of a tensor to this rank's gradient of it; what 16 bits cannot hold of that is left again."""
    key = ResidualKey(shard.name, ElementRange(shard.offset, values.numel()))
    left = residuals.source(key)
    if left is None:
        return
    # Residuals are in units of the mean, of which the gradient is yet to become a share.
    total = values.to(torch.promote_types(values.dtype, torch.float32)) + world_size * torch.from_numpy(left)
    values.copy_(total)
    torch.from_numpy(residuals.stage(key)).copy_((total - values) / world_size)


class PendingSlices:
    """The shards that wait for the rest of their batches."""

    def __init__(self) -> None:
        self._held: list[PendingSlice] = []

    def add(self, held: PendingSlice) -> None:
        self._held.append(held)

    def take(self, places: Mapping[str, Place], complete: bool) -> list[list[PendingSlice]]:
        """Hand out the batches, or only those that are complete, in the order of backward; each in that of names.

        Args:
            places: the batch of each batched tensor, whether it is here or not.
            complete: leave those that are not.
        """
        if not self._held:
            return []
        batches: dict[Place, list[PendingSlice]] = {}
        for held in sorted(self._held, key=lambda held: held.tensor):
            batches.setdefault(places[held.shard.name], []).append(held)
        sizes = Counter(places.values())
        ready = [place for place, batch in batches.items() if not complete or len(batch) == sizes[place]]
        self._held = [held for held in self._held if places[held.shard.name] not in ready]
        return [batches[place] for place in sorted(ready, key=lambda place: place[1])]
