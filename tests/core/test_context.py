"""The two random streams: what each key depends on, and that all processes get the same keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec

BASE = Context("layer.weight", step=3, rank=1, world_size=4, seed=7, offset=1024, stage=2)
SHARED, PRIVATE = 0x3B1796211D40BDE8, 0xDD9BFC3629D71CFC


@pytest.mark.parametrize(
    ("changed", "shared_changes", "private_changes"),
    [
        ({"name": "layer.bias"}, True, True),
        ({"seed": 8}, True, True),
        ({"step": 4}, True, True),
        ({"rank": 2}, False, True),
        ({"stage": 3}, False, True),
        # Elements are counted from the start of the tensor, so ranges of one stream are not other streams.
        ({"offset": 0}, False, False),
        ({"world_size": 2}, False, False),
        ({"spec": TensorSpec((5,))}, False, False),
        ({"aux": {"momentum": torch.zeros(1)}}, False, False),
    ],
)
def test_what_each_stream_depends_on(changed: dict, shared_changes: bool, private_changes: bool) -> None:
    other = dataclasses.replace(BASE, **changed)
    assert (other.shared_key != BASE.shared_key) == shared_changes
    assert (other.private_key != BASE.private_key) == private_changes


def test_all_ranks_share_one_key_and_have_private_ones() -> None:
    contexts = [dataclasses.replace(BASE, rank=rank, stage=stage) for rank in range(64) for stage in range(8)]
    assert len({context.shared_key for context in contexts}) == 1
    assert len({context.private_key for context in contexts} | {BASE.shared_key}) == 64 * 8 + 1


@given(
    st.text(max_size=20), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**16)
)  # fmt: skip
def test_keys_are_64_bits_for_any_name_and_seed(name: str, seed: int, step: int, rank: int) -> None:
    context = Context(name, step=step, rank=rank, seed=seed)
    assert 0 <= context.shared_key < 1 << 64
    assert 0 <= context.private_key < 1 << 64
    assert context == Context(name, step=step, rank=rank, seed=seed)


def test_keys_are_the_same_in_every_process_and_release() -> None:
    """A key that used `hash`, which is salted, or another digest would differ here."""
    assert (BASE.shared_key, BASE.private_key) == (SHARED, PRIVATE)
