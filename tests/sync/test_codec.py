"""The codec alone: unused parameters, which rank is blamed for bad bytes, and the preliminary round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.compressors.base import SummableCompressor
from gradwire.core.errors import SyncError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync.adding_codecs import AccumulatorCodec, DenseCodec, make_codec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY, PayloadCodec
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags
from gradwire.wire.payload import Payload

NUMEL, WORLD_SIZE = 3000, 3
CHUNK = Chunk(0, 0, NUMEL)
PRESENT = FrameFlags.PRESENT
SHARED = gw.make("int8shared", stochastic=False)
MATRIX = [("none", "none"), ("threelc", "error"), ("onebit", "error"), ("topk", "error"), ("int8", "none")]


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def codec(
    rank: int, compressor: object, feedback: str = "none", *, used: bool = True, strategy: str = "allgather"
) -> PayloadCodec:
    values = gradient(rank) if used else torch.zeros(NUMEL)
    entry = PlanEntry(compressor, strategy, feedback=feedback)  # type: ignore[arg-type]
    job = TensorJob(TensorLayout("fc.weight", 0, entry, torch.float32, NUMEL), values, 0, 1, used)
    return make_codec(job, Residuals(), rank, WORLD_SIZE, seed=5)


def shared(used: tuple[bool, ...] = (True, True, True)) -> list[PayloadCodec]:
    """One accumulator codec per rank, after the preliminary round."""
    codecs = [codec(rank, SHARED, used=flag) for rank, flag in enumerate(used)]
    statistics = [stats(each) for each in codecs]
    for each in codecs:
        each.reduce_stats(CHUNK, statistics)
    return codecs


class FixedPoint(SummableCompressor):
    """Multiples of 2^-5 in 16 bits: it can be summed, and needs no preliminary round."""

    name = "fixedpoint"

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        return 2 * spec.numel

    def encode(self, grad, ctx, stats=(), *, scale=1.0, **_):
        return Payload((32 * scale * grad).round().to(torch.int16).numpy().view(np.uint8))

    def decode(self, payload, ctx, out=None, *, accumulate=False, stats=()):
        raise NotImplementedError

    def accumulator_dtype(self, world_size: int, num_payloads: int | None = None) -> np.dtype:
        return np.dtype(np.int32)

    def accumulator_size(self, spec: TensorSpec) -> int:
        return spec.numel

    def accumulate(self, payload, ctx, accumulator) -> None:
        accumulator += payload.body.view(np.int16)

    def finalize(self, accumulator, count, ctx, stats, out):
        assert not stats
        return out.copy_(torch.from_numpy(accumulator) / 32)


def broken(payload: Payload, body: np.ndarray) -> Payload:
    return replace(payload, body=body)


def start(one: PayloadCodec) -> Payload:
    """What the others receive of a rank."""
    return replace(one.start(CHUNK), sender=one.rank)


def stats(one: PayloadCodec) -> Payload:
    return replace(one.stats(CHUNK), sender=one.rank)


def merge(one: PayloadCodec, payloads: list[Payload], stage: int) -> Payload:
    call = one.encode_and_merge if isinstance(one, AccumulatorCodec) else one.merge
    return replace(call(CHUNK, payloads, stage), sender=one.rank)


# -- unused parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "feedback"), MATRIX)
def test_an_unused_gradient_is_an_empty_message_and_leaves_the_residual_alone(name: str, feedback: str) -> None:
    one = codec(0, gw.make(name), feedback, used=False)
    message = start(one)
    assert (message.flags, message.body.size) == (PRESENT, 0)
    assert one._residuals.nbytes == 0


def test_the_mean_is_zero_if_no_rank_used_the_parameter() -> None:
    nobody = Payload.received(EMPTY, PRESENT, 1)
    for each in (codec(0, gw.make("none"), used=False), shared((False, False, False))[0]):
        merged = merge(each, [nobody], 1)
        assert not merged.used
        each.job.values.fill_(7)
        each.decode(CHUNK, [merged], 1)
        assert not each.job.values.any()
        each.job.values.fill_(7)
        each.decode_sum(CHUNK, [nobody])
        assert not each.job.values.any()


def test_an_unused_rank_counts_as_zero_in_the_mean() -> None:
    ranks = [codec(0, gw.make("none")), codec(1, gw.make("none"), used=False), codec(2, gw.make("none"))]
    messages = [start(each) for each in ranks]
    ranks[1].decode_sum(CHUNK, messages)
    assert torch.allclose(ranks[1].job.values, (gradient(0) + gradient(2)) / WORLD_SIZE, atol=1e-6)
    summed = shared((True, False, True))
    summed[1].decode_sum(CHUNK, [start(each) for each in summed])
    assert torch.allclose(summed[1].job.values, (gradient(0) + gradient(2)) / WORLD_SIZE, atol=0.05)


# -- non-finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "threelc", "topk"])
def test_a_nan_of_one_rank_marks_the_jobs_of_all(name: str) -> None:
    ranks = [codec(rank, gw.make(name), "error" if name != "none" else "none") for rank in range(WORLD_SIZE)]
    ranks[2].job.values[17] = torch.nan
    merged = merge(ranks[0], [start(each) for each in ranks[1:]], 1)
    assert merged.nonfinite
    for each in ranks:
        each.decode(CHUNK, [merged], 1)
        assert each.job.nonfinite
        assert each.job.values.isnan().any()


def test_a_nan_shows_in_shared_scales_before_anything_is_encoded() -> None:
    codecs = [codec(rank, SHARED) for rank in range(WORLD_SIZE)]
    codecs[1].job.values[5] = torch.inf
    statistics = [stats(each) for each in codecs]
    for each in codecs:
        each.reduce_stats(CHUNK, statistics)
        message = start(each)
        assert message.nonfinite and message.body.size == 0
    merged = merge(codecs[0], [start(codecs[1])], 1)
    assert merged.nonfinite
    codecs[2].decode(CHUNK, [merged], 1)
    assert codecs[2].job.nonfinite
    assert codecs[2].job.values.isnan().all()


def test_payloads_add_up_without_a_preliminary_round() -> None:
    codecs = [codec(rank, FixedPoint()) for rank in range(WORLD_SIZE)]
    assert all(type(each) is AccumulatorCodec and not each.compressor.needs_stats for each in codecs)
    codecs[0].decode_sum(CHUNK, [start(each) for each in codecs])
    exact = sum(gradient(rank) for rank in range(WORLD_SIZE)) / WORLD_SIZE
    assert torch.allclose(codecs[0].job.values, exact, atol=WORLD_SIZE / 64 + 1e-6)


# -- bad bytes -----------------------------------------------------------------------------------------------------


def expect_blame(call: object, rank: int) -> str:
    with pytest.raises(SyncError) as caught:
        call()  # type: ignore[operator]
    error = caught.value
    assert (error.rank, error.tensor, error.phase) == (rank, "fc.weight", "decode")
    assert str(error).startswith(f"Rank {rank} sent bytes that are not a payload of fc.weight: ")
    assert str(error).endswith(". Run one gradwire version on all ranks, and check that rank's memory.")
    return str(error)


@pytest.mark.parametrize(("name", "feedback"), MATRIX)
def test_the_rank_that_sent_bad_bytes_is_named(name: str, feedback: str) -> None:
    ranks = [codec(rank, gw.make(name), feedback) for rank in range(WORLD_SIZE)]
    messages = [start(each) for each in ranks]
    bad = broken(messages[1], messages[1].body[:-1])
    expect_blame(lambda: ranks[0].decode_sum(CHUNK, [messages[0], bad, messages[2]]), 1)
    expect_blame(lambda: merge(ranks[0], [messages[2], bad], 1), 1)
    expect_blame(lambda: ranks[2].decode(CHUNK, [bad], 1), 1)
    expect_blame(lambda: ranks[2].decode(CHUNK, [broken(messages[0], EMPTY)], 1), 0)


@pytest.mark.parametrize("length", [0, 1, NUMEL - 1])
def test_accumulators_and_payloads_of_another_length_are_blamed_on_their_sender(length: int) -> None:
    codecs = shared()
    messages = [start(each) for each in codecs]
    bad = broken(messages[2], messages[2].body[:length])
    expect_blame(lambda: merge(codecs[0], [messages[1], bad], 1), 2)
    expect_blame(lambda: codecs[0].decode_sum(CHUNK, [messages[1], bad]), 2)
    summed = merge(codecs[0], messages[1:], 1)
    for cut in (0, 2, 2 * length, summed.body.size - 1):  # a single element would be added to all elements
        said = expect_blame(lambda cut=cut: codecs[1].decode(CHUNK, [broken(summed, summed.body[:cut])], 1), 0)
        assert f"Expected {summed.body.size} bytes, got {cut}." in said


@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_statistics_of_another_length_are_blamed_on_their_sender(length: int) -> None:
    codecs = [codec(rank, SHARED) for rank in range(WORLD_SIZE)]
    statistics = [stats(each) for each in codecs]
    statistics[1] = broken(statistics[1], statistics[1].body[:length])
    expect_blame(lambda: codecs[0].reduce_stats(CHUNK, statistics), 1)


def test_statistics_of_a_rank_that_has_none_are_refused() -> None:
    codecs = [codec(rank, SHARED) for rank in range(WORLD_SIZE)]
    statistics = [stats(each) for each in codecs]
    statistics[2] = replace(statistics[2], used=False)
    expect_blame(lambda: codecs[0].reduce_stats(CHUNK, statistics), 2)


# -- the preliminary round -----------------------------------------------------------------------------------------


def test_every_rank_reduces_to_the_same_scales() -> None:
    codecs = shared()
    block = SHARED.options["block"]
    largest = np.abs(np.stack([gradient(rank).numpy() for rank in range(WORLD_SIZE)])).max(0)
    padded = np.pad(largest, (0, -NUMEL % block)).reshape(-1, block).max(1) / WORLD_SIZE
    for each in codecs:
        (scales,) = each._stats[CHUNK.index]
        assert scales.tobytes() == codecs[0]._stats[CHUNK.index][0].tobytes()
        np.testing.assert_allclose(scales, padded, rtol=1e-6)


def test_reducing_does_not_change_the_messages() -> None:
    """The same message is sent on to peers while it is reduced here."""
    codecs = [codec(rank, SHARED) for rank in range(WORLD_SIZE)]
    statistics = [stats(each) for each in codecs]
    before = [message.body.tobytes() for message in statistics]
    codecs[0].reduce_stats(CHUNK, statistics)
    assert [message.body.tobytes() for message in statistics] == before


def test_ranks_that_did_not_use_the_parameter_do_not_affect_the_scales() -> None:
    codecs = shared((False, True, False))
    (scales,) = codecs[0]._stats[CHUNK.index]
    (alone,) = SHARED.stats(gradient(1), codecs[1]._context(CHUNK, 0), 1 / WORLD_SIZE)
    np.testing.assert_array_equal(scales, alone.values)
    (nobody,) = shared((False, False, False))[0]._stats[CHUNK.index]
    assert not nobody.any()


def test_integer_sums_are_the_same_along_every_path() -> None:
    """All at once, merged at an owner, or hop by hop: integer sums are equal."""
    at_once, owner, hops = shared(), shared(), shared()
    at_once[0].decode_sum(CHUNK, [start(each) for each in at_once])
    owner[1].decode(CHUNK, [merge(owner[0], [start(each) for each in owner[1:]], 1)], 1)
    partial = merge(hops[1], [start(hops[0])], 1)
    hops[0].decode(CHUNK, [merge(hops[2], [partial], 2)], 2)
    assert torch.equal(at_once[0].job.values, owner[1].job.values)
    assert torch.equal(at_once[0].job.values, hops[0].job.values)


@pytest.mark.parametrize("dtype", list(ELEMENT_TYPES), ids=str)
@pytest.mark.parametrize("compressor", [SHARED, gw.make("int8"), gw.make("none")], ids=repr)
def test_the_mean_is_written_in_every_element_type(compressor: object, dtype: torch.dtype) -> None:
    codecs = [codec(rank, compressor) for rank in range(WORLD_SIZE)]
    for each in codecs:
        each.job.values = each.job.values.to(dtype)
        each.layout.dtype = dtype
    if compressor is SHARED:
        statistics = [stats(each) for each in codecs]
        for each in codecs:
            each.reduce_stats(CHUNK, statistics)
    codecs[0].decode_sum(CHUNK, [start(each) for each in codecs])
    mean = codecs[0].job.values
    assert mean.dtype == dtype
    exact = sum(gradient(rank).double() for rank in range(WORLD_SIZE)) / WORLD_SIZE
    assert torch.allclose(mean.double(), exact, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("used", [(True, True, True), (False, True, True), (True, False, False), (False,) * 3])
def test_dense_ranks_are_added_in_their_order_whoever_adds(dtype: torch.dtype, used: tuple[bool, ...]) -> None:
    means = []
    for owner in range(WORLD_SIZE):
        codecs = [
            codec(rank, gw.make("none"), used=used[rank], strategy="scatter_reduce") for rank in range(WORLD_SIZE)
        ]
        assert all(type(each) is DenseCodec for each in codecs)
        for each in codecs:
            each.job.values = each.job.values.to(dtype)
            each.layout.dtype = dtype
        others = [start(each) for rank, each in enumerate(codecs) if rank != owner]
        mean = merge(codecs[owner], others, 1)
        for each in codecs:
            each.decode(CHUNK, [mean], 1)
        assert all(torch.equal(each.job.values, codecs[0].job.values) and not each.job.nonfinite for each in codecs)
        means.append(codecs[owner].job.values)
    assert all(torch.equal(means[0], mean) for mean in means)
    exact = sum((gradient(rank).to(dtype).double() * used[rank] for rank in range(WORLD_SIZE)), torch.zeros(NUMEL))
    assert torch.allclose(means[0].double(), exact / WORLD_SIZE, atol=0.02)


def test_float64_is_added_in_float64() -> None:
    codecs = [codec(rank, gw.make("none"), strategy="scatter_reduce") for rank in range(WORLD_SIZE)]
    for rank, each in enumerate(codecs):
        each.job.values = torch.full((NUMEL,), (1 + rank) * (1 + 1e-10), dtype=torch.float64)
        each.layout.dtype = torch.float64
    codecs[0].decode(CHUNK, [merge(codecs[0], [start(each) for each in codecs[1:]], 1)], 1)
    mean = (1 + WORLD_SIZE) / 2 * (1 + 1e-10)
    assert torch.allclose(codecs[0].job.values, torch.full((), mean, dtype=torch.float64), rtol=1e-15, atol=0)


def test_a_dense_mean_that_is_not_finite_is_marked() -> None:
    codecs = [codec(rank, gw.make("none"), strategy="scatter_reduce") for rank in range(WORLD_SIZE)]
    codecs[1].job.values[5] = torch.inf
    mean = merge(codecs[0], [start(each) for each in codecs[1:]], 1)
    for each in codecs:
        each.decode(CHUNK, [mean], 1)
        assert each.job.nonfinite


def test_dense_bytes_of_another_length_are_blamed_on_their_sender() -> None:
    codecs = [codec(rank, gw.make("none"), strategy="scatter_reduce") for rank in range(WORLD_SIZE)]
    sent = start(codecs[2])
    for use in (lambda bad: merge(codecs[0], [bad], 1), lambda bad: codecs[0].decode(CHUNK, [bad], 1)):
        with pytest.raises(SyncError, match="Rank 2 sent bytes that are not a payload"):
            use(broken(sent, sent.body[:-4]))


def test_an_aggregate_of_shared_statistics_carries_its_own_from_hop_to_hop() -> None:
    """As on a ring: only the first payload was encoded with shared statistics."""
    codecs = [codec(rank, gw.make("terngrad", clip=0.0)) for rank in range(WORLD_SIZE)]
    statistics = [stats(each) for each in codecs]
    for each in codecs:
        each.reduce_stats(CHUNK, statistics)
    message = start(codecs[0])
    sizes = [message.body.size]
    for hop in (1, 2):
        message = merge(codecs[hop], [message], hop)
        sizes.append(message.body.size)
    assert sizes == [NUMEL // 5, NUMEL // 5 + 4, NUMEL // 5 + 4]
    codecs[0].decode(CHUNK, [message], 2)
    assert codecs[0].job.values.unique().numel() == 3
