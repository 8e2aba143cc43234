"""The replica check: one bit is enough, and the odd rank is named on all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import PeerFailedError, ReplicaError
from gradwire.sync.plan import Plan
from gradwire.sync.replica import fingerprint
from gradwire.sync.synchronizer import Synchronizer
from tests.sync.harness import ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=source).to(dtype) for shape in ((40, 7), (13,), (), (0,))]


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_one_bit_anywhere_changes_the_fingerprint(data: st.DataObject, dtype: torch.dtype) -> None:
    tensors = parameters(dtype)
    before = fingerprint(tensors)
    chosen = tensors[data.draw(st.integers(0, 2))].view(-1)
    words = chosen.view(BITS[dtype.itemsize])
    at, bit = data.draw(st.integers(0, words.numel() - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    words[at] ^= 1 << bit
    assert fingerprint(tensors) != before
    words[at] ^= 1 << bit
    assert fingerprint(tensors) == before


def test_bits_count_not_values() -> None:
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])
    nan = torch.tensor([torch.nan])
    assert fingerprint([nan]) == fingerprint([nan.clone()])


def test_order_counts_and_layout_in_memory_does_not() -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.ones(4)
    assert fingerprint([first, second]) != fingerprint([second, first])
    assert fingerprint([first.T.contiguous().T, second]) == fingerprint([first, second])
    assert fingerprint([torch.nn.Parameter(first), second]) == fingerprint([first, second])
    assert fingerprint([]) == fingerprint([torch.empty(0)]) == 0


def check(odd: dict[int, float], world_size: int) -> list[Exception | None]:
    def run(one: Synchronizer) -> None:
        one.begin_step()
        one.check_replicas([torch.full((100,), odd.get(one.rank, 1.0))])
        one.wait()

    with ranks(world_size, Plan("none")) as group:
        return group.outcomes(run)


def test_equal_replicas_pass_again_and_again() -> None:
    def run(one: Synchronizer) -> None:
        for step in range(5):
            one.check_replicas([torch.full((10,), float(step))])
        one.wait()

    with ranks(3, Plan("none")) as group:
        assert group.outcomes(run) == [None, None, None]
        assert [sum(transport.sent_bytes) for transport in group.network.transports] == [5 * 2 * 96] * 3


@pytest.mark.parametrize(
    ("odd", "world_size", "named"),
    [
        ({2: 2.0}, 3, [2]),
        ({0: 2.0}, 4, [0]),  # the majority is right, not the first
        ({1: 2.0, 3: 3.0}, 5, [1, 3]),
        ({1: 2.0}, 2, [1]),  # no majority among two: the first counts, on both
        ({0: 2.0, 1: 2.0}, 4, [2, 3]),  # two against two: the first's side counts
    ],
)
def test_ranks_that_differ_from_the_majority_are_named_on_all(odd: dict, world_size: int, named: list[int]) -> None:
    for error in check(odd, world_size):
        # A rank that hears of the failure before it has all hashes passes the message on.
        assert isinstance(error, (ReplicaError, PeerFailedError))
        assert error.rank == named[0]
        assert f"The parameters of rank {', '.join(map(str, named))} differ" in str(error)
        assert "broadcast them from one rank" in str(error)


def test_the_error_says_where_it_comes_from() -> None:
    found = [error for error in check({1: 5.0}, 3) if isinstance(error, ReplicaError)]
    assert found
    assert all((error.tensor, error.phase) == ("parameters", "replica check") for error in found)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 7}, "Rank 1 is in step 7, and rank 0 in step 2. On all ranks, load the states that one job"),
        ({"seed": 4}, "Rank 1 has another seed than rank 0. On all ranks, load"),
    ],
)
def test_ranks_that_load_states_of_different_steps_or_jobs_are_named(changed: dict[str, int], said: str) -> None:
    def run(one: Synchronizer) -> None:
        one.load_state_dict({**one.state_dict(), "step": 2} | (changed if one.rank == 1 else {}))
        one.check_replicas(None)
        one.wait()

    with ranks(3, Plan("none")) as group:
        for error in group.outcomes(run):
            assert isinstance(error, (ReplicaError, PeerFailedError))
            assert said in str(error)
            assert error.rank == 1


def test_the_majority_is_right_about_the_step() -> None:
    def run(one: Synchronizer) -> None:
        one.load_state_dict({**one.state_dict(), "step": 5 if one.rank == 0 else 6})
        one.check_replicas(None)
        one.wait()

    with ranks(3, Plan("none")) as group:
        for error in group.outcomes(run):
            assert "Rank 0 is in step 5, and rank 1 in step 6." in str(error)


def test_states_of_one_step_with_a_seed_of_any_size_are_equal() -> None:
    def run(one: Synchronizer) -> None:
        one.load_state_dict({**one.state_dict(), "step": 40, "seed": 2**70})
        one.check_replicas(None)
        one.wait()

    with ranks(3, Plan("none")) as group:
        assert group.outcomes(run) == [None, None, None]
