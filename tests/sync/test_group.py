"""What is taken of a process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gradwire.core.errors import AttachError
from gradwire.sync.group import GroupInfo


def test_without_torch_distributed_it_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(AttachError, match=r"init_process_group\(\) first, and start the script with torchrun"):
        GroupInfo.of(None)


def test_a_group_info_is_taken_as_it_is() -> None:
    info = GroupInfo(1, 3, dist.HashStore(), "mine")
    assert GroupInfo.of(info) is info


def test_a_process_group_is_looked_up() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default = GroupInfo.of(None)
        assert (default.rank, default.world_size) == (0, 1)
        assert GroupInfo.of(dist.group.WORLD) == default
        other = GroupInfo.of(dist.new_group([0]))
        assert other.name != default.name
        # Each group has its own part of the store, so that two jobs never meet under one key.
        default.store.set("gradwire/test", "default")
        assert not other.store.check(["gradwire/test"])
        assert default.store.get("gradwire/test") == b"default"
    finally:
        dist.destroy_process_group()


def test_synchronizers_are_counted_by_group_and_rank() -> None:
    store = dist.HashStore()
    first, again, other = (GroupInfo(0, 2, store, name) for name in ("counted", "counted", "counted too"))
    peer = GroupInfo(1, 2, store, "counted")
    assert [first.next_number(), again.next_number(), other.next_number(), peer.next_number()] == [1, 2, 1, 1]


def test_ranks_of_a_group_that_is_made_again_have_the_same_numbers() -> None:
    """Rank 0 has survived, and rank 1 is a new process. torch gives the group its old name, and a new store."""
    GroupInfo(0, 2, dist.HashStore(), "0").next_number()
    store = dist.HashStore()
    assert [GroupInfo(rank, 2, store, "0").next_number() for rank in range(2)] == [1, 1]
