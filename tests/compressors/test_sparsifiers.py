"""All sparsifiers: lists in few bits, and payloads of all ranks summed in one sweep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.compressors import make
from gradwire.compressors.base import Compressor
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from tests.compressors.harness import list_bytes

TILE = 1 << 15  # elements of the output that are summed at a time
LISTS = ("dgc", "dragonn", "graddrop", "mstopk", "randomk", "threshold", "topk")
each_list = pytest.mark.parametrize("name", LISTS)


def gradients(size: int, ranks: int) -> list[torch.Tensor]:
    """Normal elements, with the largest at both ends and on both sides of a tile's edge."""
    found = []
    for rank in range(ranks):
        grad = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        for place in {0, min(TILE - 1, size - 1), min(TILE, size - 1), size - 1}:
            grad[place] = 4.0 + rank
        found.append(grad)
    return found


def encoded(codec: Compressor, grads: list[torch.Tensor]) -> tuple[list, list[Context]]:
    ctxs = [Context("w", rank=rank, spec=TensorSpec.of(grad)) for rank, grad in enumerate(grads)]
    return [codec.encode(grad, ctx) for grad, ctx in zip(grads, ctxs)], ctxs


@pytest.mark.parametrize("size", [7, TILE, 2 * TILE + 5])
@pytest.mark.parametrize("name", [*LISTS, "adacomp"])
def test_the_sum_of_all_ranks_is_that_of_decoding_one_after_the_other(name: str, size: int) -> None:
    codec = make(name)
    for ranks in (1, 2, 5):
        payloads, ctxs = encoded(codec, gradients(size, ranks))
        expected = np.zeros(size, np.float32)
        for payload, ctx in zip(payloads, ctxs):
            expected += codec.decode(payload, ctx).numpy()  # in float32 and the order of ranks
        found = codec.decode_sum(payloads, ctxs, torch.full((size,), torch.nan))
        assert found.numpy().tobytes() == expected.tobytes()


@each_list
def test_ranks_that_send_nothing_are_part_of_the_sum(name: str) -> None:
    codec, size = make(name), 2 * TILE
    grads = gradients(size, 3)
    grads[1] = torch.zeros(size)
    payloads, ctxs = encoded(codec, grads)
    expected = codec.decode(payloads[0], ctxs[0]) + codec.decode(payloads[2], ctxs[2])
    assert torch.equal(codec.decode_sum(payloads, ctxs, torch.empty(size)), expected)


@each_list
@pytest.mark.parametrize("size", [300, 70_000])
def test_a_payload_is_values_and_positions_in_the_fewest_bits(name: str, size: int) -> None:
    codec = make(name)
    (payload,), (ctx,) = encoded(codec, gradients(size, 1))
    kept = int(codec.decode(payload, ctx).count_nonzero())
    length = 4 if name != "topk" else 0  # topk's is known
    assert kept > 0
    assert payload.body.nbytes == list_bytes(size, kept) - 4 + length
    assert payload.body.nbytes < length + 8 * kept  # what 32-bit positions would take


def test_where_most_is_kept_positions_are_a_bitmap() -> None:
    codec, grad = make("threshold"), torch.ones(8000)
    grad[::5] = 0.0
    payload = codec.encode(grad, Context("w", spec=TensorSpec.of(grad)))
    assert payload.body.nbytes == 4 + 4 * 6400 + 8000 // 8
