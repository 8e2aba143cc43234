"""What gradwire needs of a torch.distributed process group: rank, size, and the job's store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradwire.core.errors import AttachError

_numbers: Counter[tuple[str, int]] = Counter()


@dataclass(frozen=True)
class GroupInfo:
    """Rank, size and store of one process group.

    Attributes:
        rank: this process in the group.
        world_size: ranks in the group.
        store: the group's own part of the job's store.
        name: name of the group in torch.distributed.
    """

    rank: int
    world_size: int
    store: Any
    name: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | GroupInfo | None) -> GroupInfo:
        """Look a group up; a `GroupInfo` is returned as it is.

        Raises:
            AttachError: torch.distributed is not initialized.
        """
        if isinstance(group, GroupInfo):
            return group
        if not dist.is_initialized():
            raise AttachError(
                "Expected an initialized process group, got none. Do: call torch.distributed.init_process_group() "
                "first, and start the script with torchrun."
            )
        group = group or dist.group.WORLD
        assert group is not None
        store = dist.distributed_c10d._get_process_group_store(group)  # no public way to a group's store
        return cls(dist.get_rank(group), dist.get_world_size(group), store, group.group_name)

    def next_number(self) -> int:
        """How many synchronizers this process made in the group before: equal on all ranks, as all make the same."""
        _numbers[self.name, self.rank] += 1
        return _numbers[self.name, self.rank]
