"""Top-k: number, choice and format of the elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.topk import _index_dtype
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec
from tests.contracts.compressor_cases import context, normal, with_body


@pytest.mark.parametrize(
    ("ratio", "size", "kept"), [(0.07, 100, 7), (0.01, 1, 1), (0.01, 101, 2), (1, 5, 5), (0.5, 0, 0)]
)
def test_kept_is_the_ceiling_in_decimal_and_at_least_one(ratio, size, kept) -> None:
    assert compressors.make("topk", ratio=ratio).num_kept(size) == kept


def test_the_largest_are_kept_and_ties_go_to_the_lowest_index() -> None:
    codec, grad = compressors.make("topk", ratio=0.5), torch.tensor([1.0, -3.0, 1.0, 2.0, -1.0, 0.5, 1.0, 0.0])
    found = codec.decode(codec.encode(grad, context(grad)), context(grad))
    assert found.tolist() == [1, -3, 1, 2, 0, 0, 0, 0]


def test_indices_are_wide_enough() -> None:
    assert _index_dtype(1 << 32) == np.uint32
    assert _index_dtype((1 << 32) + 1) == np.int64


@pytest.mark.parametrize("positions", [b"\x00\x00", b"\x01\x00", b"\x07\x00", b"\x01\x04", b"\x01\x80"])
def test_bad_positions_are_refused(positions) -> None:
    """A bitmap of ten elements with none, one or three of two, and with bits beyond the tenth."""
    codec, grad = compressors.make("topk", ratio=0.2), normal(10)
    body = np.ones(2, np.float32).tobytes() + positions
    with pytest.raises(PayloadError, match="2 ascending positions below 10"):
        codec.decode(with_body(codec.encode(grad, context(grad)), body), context(grad))


def test_positions_take_few_bits() -> None:
    """A thousandth of a million: 32 bits of value and under 12 of position, compared to 32 for an index."""
    codec = compressors.make("topk", ratio=0.001)
    assert 8 * codec.max_encoded_bytes(TensorSpec((1_000_000,))) < 44 * 1000


@pytest.mark.parametrize(("step", "kept"), [(1, 2000), (10, 2000), (11, 500), (21, 125), (31, 80), (40, 80)])
def test_the_kept_fraction_warms_up(step: int, kept: int) -> None:
    codec, grad = compressors.make("topk", ratio=0.01, warmup=40), normal(8000)
    payload = codec.encode(grad, context(grad, step=step))
    assert np.count_nonzero(codec.decode(payload, context(grad, step=step))) == kept == codec.num_kept(8000, step)
    assert payload.body.nbytes <= codec.max_encoded_bytes(TensorSpec((8000,)))


def test_zeros_have_a_place_of_their_own() -> None:
    codec, grad = compressors.make("topk", ratio=0.3), torch.tensor([0.0] * 5 + [1.0] + [0.0] * 4)
    payload = codec.encode(grad, context(grad))
    assert payload.body[12:].tolist() == [0b100011, 0]  # elements 0, 1 and 5
    body = np.array([0, 0, 1], np.float32).tobytes() + bytes([0b100101, 0])
    with pytest.raises(PayloadError, match="zeros at the lowest indices"):
        codec.decode(with_body(payload, body), context(grad))
