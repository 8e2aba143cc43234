"""A fusion group without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.sync.fusion import FusionGroup, FusionLayout
from gradwire.sync.job import TensorLayout
from gradwire.sync.plan_entry import PlanEntry


def group_of(sizes: Sequence[tuple[int, int]], entry: PlanEntry, dtype: torch.dtype = torch.float32) -> FusionGroup:
    """A group of tensors with these rotations and numbers of elements."""
    members = [TensorLayout(f"t{index}", 3 * index, entry, dtype, count, rotation=index) for index, count in sizes]
    values = [torch.randn(count, generator=torch.Generator().manual_seed(index)).to(dtype) for index, count in sizes]
    return FusionGroup(FusionLayout(members), values, [True] * len(members), 0, 0)
