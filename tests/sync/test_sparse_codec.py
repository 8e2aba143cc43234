"""Lists of pairs on the wire, and what a codec refuses. The sums themselves are in `test_strategies`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.core.errors import PayloadError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import Chunk
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.sparse_codec import PairList, SparseCodec, list_bytes, max_list_bytes, num_rows, pack, unpack
from gradwire.wire.payload import Payload

COUNT = 1000


def codec(rank: int, world_size: int = 3, method: str = "topk:ratio=0.1") -> tuple[SparseCodec, Chunk]:
    layout = TensorLayout("w", 0, PlanEntry(gw.make(method), "sparse_reduce"), torch.float32, COUNT)
    grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))
    (chunk,) = layout.chunks(1)
    return SparseCodec(TensorJob(layout, grad, 0, 0), Residuals(), rank, world_size, 0), chunk


@given(st.sets(st.integers(0, 499), max_size=500), st.integers(500, 5000))
def test_lists_come_back(rows: set[int], num: int) -> None:
    pairs = PairList(np.array(sorted(rows), np.uint32), np.arange(1, len(rows) + 1, dtype=np.float32))
    body = pack(pairs, num)
    assert body.nbytes == list_bytes(num, len(rows)) <= list_bytes(num, num)
    found = unpack(body, num)
    np.testing.assert_array_equal(found.rows, pairs.rows)
    np.testing.assert_array_equal(found.values, pairs.values)


def test_the_longest_list_has_a_bit_for_each_row() -> None:
    assert max_list_bytes(COUNT, 3) == 4 + 4 * 334 + 42
    assert num_rows(COUNT, 3) == 334


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda body: body[:3], "more elements"),
        (lambda body: body[:-1], "more elements"),
        (lambda body: np.append(body, np.uint8(0)), "Expected the end"),
        (lambda body: np.concatenate([np.array([4000], "<u4").view(np.uint8), body[4:]]), "at most 100 pairs"),
        (lambda body: np.concatenate([body[:4], np.array([np.nan], "<f4").view(np.uint8), body[8:]]), "finite"),
        (lambda body: np.concatenate([body[:-1], np.array([255], np.uint8)]), "ascending rows"),
    ],
)
def test_damaged_lists_are_refused(damage, match: str) -> None:
    body = pack(PairList(np.array([3, 50, 99], np.uint32), np.ones(3, np.float32)), 100)
    with pytest.raises(PayloadError, match=match):
        unpack(damage(body), 100)


def test_a_position_beyond_the_tensor_names_the_sender() -> None:
    """In the last row of 1,000 elements and 3 owners, two owners have a row without a position."""
    (mine, chunk), refused = codec(0), []
    for owner in range(3):
        body = pack(PairList(np.array([333], np.uint32), np.ones(1, np.float32)), 334)
        try:
            mine._unpack(chunk, Payload(body, sender=2), owner)
        except SyncError as error:
            refused.append(error)
    assert len(refused) == 2
    assert all(error.rank == 2 and "positions below 1000" in str(error) for error in refused)


def test_sums_that_overflow_end_the_step_on_all_ranks() -> None:
    mine, chunk = codec(0)
    start = mine.start(chunk)
    huge = pack(PairList(np.array([5], np.uint32), np.array([3e38], np.float32)), 334)
    total = mine.sum_parts(chunk, [start, Payload(huge, sender=1), Payload(huge, sender=2)], 1)
    assert total.nonfinite
    mine.decode_sums(chunk, [total, replace(total, sender=1), replace(total, sender=2)], 1)
    assert mine.job.nonfinite


def test_a_method_of_ones_own_whose_decoder_scatters_lists_pairs() -> None:
    assert [name for name in gw.compressors.names() if gw.make(name).sparse] == [
        "dgc", "dragonn", "graddrop", "mstopk", "randomk", "threshold", "topk",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["topk:ratio=0.1", "dgc:ratio=0.05", "randomk:ratio=0.1"])
def test_pairs_are_what_a_payload_decodes_to(method: str) -> None:
    made, grad = gw.make(method), torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    context = gw.Context("w", spec=TensorSpec((COUNT,)))
    payload = made.encode(grad, context)
    index, values = made.pairs(payload, context, COUNT)
    dense = np.zeros(COUNT, np.float32)
    dense[index] = values
    np.testing.assert_array_equal(dense, made.decode(payload, context).numpy())
