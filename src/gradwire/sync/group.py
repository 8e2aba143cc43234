"""The process group: rank, size, and the store of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradwire.core.errors import AttachError
from gradwire.core.torch_private import group_store


@dataclass(frozen=True)
class GroupInfo:
    """Rank, size and store of one process group.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        store: Store of the group.
        name: Name of the group in torch.distributed.
    """

    rank: int
    world_size: int
    store: Any
    name: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | GroupInfo | None) -> GroupInfo:
        """Return the info of a group. None is the default group; a `GroupInfo` is returned as it is.

        Raises:
            AttachError: torch.distributed is not initialized.
        """
        if isinstance(group, GroupInfo):
            return group
        if not dist.is_initialized():
            raise AttachError(
                "There is no process group. Call torch.distributed.init_process_group() first, and start the script "
                "with torchrun."
            )
        group = group or dist.group.WORLD
        assert group is not None
        return cls(dist.get_rank(group), dist.get_world_size(group), group_store(group), group.group_name)

    def next_number(self) -> int:
        """Return the next number of a synchronizer in the group. All ranks make the same ones, so it is the same.

        The store counts, not the process: ranks of a group that is made again have processes of different ages.
        """
        number: int = self.store.add(f"gradwire/{self.name}/number/{self.rank}", 1)
        return number
