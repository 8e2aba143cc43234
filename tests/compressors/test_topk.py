"""What is particular to top-k: how many, which, and in what form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.topk import _index_dtype
from gradwire.core.errors import PayloadError
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


@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [0, 10], [0, 2**32 - 1]])
def test_bad_indices_are_refused(indices) -> None:
    codec, grad = compressors.make("topk", ratio=0.2), normal(10)
    body = np.array(indices, np.uint32).tobytes() + np.ones(2, np.float32).tobytes()
    with pytest.raises(PayloadError, match="ascending indices below 10"):
        codec.decode(with_body(codec.encode(grad, context(grad)), body), context(grad))


def test_zeros_have_a_place_of_their_own() -> None:
    codec, grad = compressors.make("topk", ratio=0.3), torch.tensor([0.0] * 5 + [1.0] + [0.0] * 4)
    payload = codec.encode(grad, context(grad))
    assert payload.body[:12].view(np.uint32).tolist() == [0, 1, 5]
    body = np.array([0, 2, 5], np.uint32).tobytes() + np.array([0, 0, 1], np.float32).tobytes()
    with pytest.raises(PayloadError, match="zeros at the lowest indices"):
        codec.decode(with_body(payload, body), context(grad))
