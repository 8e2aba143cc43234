"""THC: shared norms, widths, error against closed forms, and residuals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire.compressors as compressors
from gradwire.compressors.base.registry import spec_of
from gradwire.compressors.support.homomorphic import Homomorphic
from gradwire.compressors.support.thc_tables import threshold
from gradwire.compressors.thc import THC
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.spec import TensorSpec
from gradwire.kernels.reference import hadamard
from gradwire.testing.accumulators import accumulated
from tests.compressors.harness import sent
from tests.contracts.compressor_cases import EDGE_TENSORS, context, heavy_tailed, normal, reduced, with_body


def thc(**options) -> THC:
    codec = compressors.make("thc", **options)
    assert isinstance(codec, THC)
    return codec


def aggregated(codec: THC, grads: list[torch.Tensor], **fields) -> torch.Tensor:
    """Return the mean from accumulators, as strategies compute it."""
    world_size = len(grads)
    ctxs = [context(grad, rank=rank, world_size=world_size, **fields) for rank, grad in enumerate(grads)]
    stats = reduced(codec, grads, 1 / world_size)
    lanes = np.zeros(codec.accumulator_size(TensorSpec.of(grads[0])), codec.accumulator_dtype(world_size))
    for grad, ctx in zip(grads, ctxs, strict=True):
        payload = codec.encode(grad, ctx, stats, scale=1 / world_size)
        codec.accumulate(payload, ctx, lanes)
    return codec.finalize(lanes, world_size, ctxs[0], stats, torch.empty(grads[0].shape))


def nmse(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact.double()) ** 2).sum() / (exact.double() ** 2).sum())


def clamped_error(p: float) -> float:
    """Clamping error of a normal coordinate: twice the integral of (a - t)^2 from t on."""
    t = threshold(p)
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return (1 + t * t) * p - 2 * t * density


# -- what is shared -----------------------------------------------------------------------------------------------


def test_norms_travel_in_no_payload_but_where_there_were_none() -> None:
    codec, grad = thc(granularity=30, block=64), normal(200)
    stats = reduced(codec, [grad])
    bare, whole = codec.encode(grad, context(grad), stats), codec.encode(grad, context(grad))
    assert bare.body.nbytes == 100 and whole.body.nbytes == 100 + 4 * 4
    assert torch.equal(codec.decode(bare, context(grad), stats=stats), codec.decode(whole, context(grad)))
    with pytest.raises(PayloadError, match="Expected 116 bytes, got 100"):
        codec.decode(bare, context(grad))
    with pytest.raises(ValueError, match="Pass the result of `stats`, reduced over ranks"):
        codec.decode(bare, context(grad), stats=[np.ones(3, np.float32)])


def test_what_is_shared_is_the_largest_root_mean_square_of_each_block() -> None:
    codec, grads = thc(block=64), [normal(192, seed=rank) * 10.0**rank for rank in range(3)]
    (found,) = reduced(codec, grads, 0.5)
    expected = (grads[2].reshape(3, 64).double() ** 2).mean(1).sqrt() / 2
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert codec.stats_spec(TensorSpec((192,))) == [(3, "max")]
    assert thc(rotate="full").stats_spec(TensorSpec((1 << 16,))) == [(1, "max")]
    assert thc(rotate="full").stats_spec(TensorSpec((50_000,))) == [(4, "max")], "3 blocks of 2^14, one of 2^10"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_norms_that_no_encoder_sends_are_refused(bad: float) -> None:
    codec, grad = thc(), normal(40)
    payload = codec.encode(grad, context(grad))
    body = np.float32(bad).tobytes() + bytes(payload.body[4:])
    with pytest.raises(PayloadError, match="scales of blocks"):
        codec.decode(with_body(payload, body), context(grad))


def test_a_norm_for_each_block_and_not_one_for_all() -> None:
    """Blocks of log-normal scales: with one norm, small blocks vanish in the rounding of large ones."""
    scales = torch.from_numpy(np.exp(2 * np.random.default_rng(1).standard_normal(64)).astype(np.float32))
    grad = (normal(64 * 1024).reshape(64, 1024) * scales[:, None]).reshape(-1)
    each = aggregated(thc(granularity=30), [grad] * 4).reshape(64, 1024)
    codec, blocks = thc(granularity=30), grad.reshape(64, 1024)
    stats = [np.full(64, reduced(codec, [grad])[0].max() / 4)]
    ctx = context(grad, world_size=4)
    one = 4 * codec.decode(codec.encode(grad, ctx, stats, scale=0.25), ctx, stats=stats)
    small = scales < scales.median()
    assert nmse(each[small], blocks[small]) < 0.05
    assert nmse(one.reshape(64, 1024)[small], blocks[small]) > 1


# -- widths -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(2, 4), st.integers(15, 120), st.integers(1, 70))
def test_lanes_hold_all_ranks_at_the_largest_value(bits: int, granularity: int, world_size: int) -> None:
    codec = thc(bits=bits, granularity=granularity)
    grad, lane = normal(100), codec.accumulator_dtype(world_size)
    ctx = context(grad, world_size=world_size)
    payload = with_body(codec.encode(grad, ctx, reduced(codec, [grad])), b"\xff" * (128 * bits // 8))
    lanes = np.zeros(codec.accumulator_size(TensorSpec((100,))), lane)
    for _ in range(world_size):
        codec.accumulate(payload, ctx, lanes)
    assert (lanes[:-1] == world_size * granularity).all() and lanes[-1] == world_size
    assert lanes.itemsize == 1 or world_size * granularity > np.iinfo(f"u{lanes.itemsize // 2}").max


def test_eight_ranks_in_8_bits_at_granularity_30_nine_widen_or_are_refused() -> None:
    assert thc(granularity=30).accumulator_dtype(8) == np.uint8
    assert thc(granularity=30).accumulator_dtype(9) == np.uint16
    with pytest.raises(OptionError, match="accumulator_bits=16, or a granularity of at most 28"):
        thc(granularity=30, accumulator_bits=8).accumulator_dtype(9)
    assert thc(accumulator_bits=8).accumulator_dtype(9) == np.uint8
    assert thc(accumulator_bits=8).max_contribution(9) <= 28


def test_the_clamp_follows_the_ranks_only_if_that_is_asked_for() -> None:
    assert [thc().table(ranks).p for ranks in (1, 4, 16, 64)] == [1 / 32] * 4
    assert [1 / thc(p=None).table(ranks).p for ranks in (1, 2, 4, 8, 16, 64)] == [32, 32, 64, 128, 256, 256]
    table = thc(granularity=30, p=None).table(16)
    assert (table.granularity, table.p) == (30, 1 / 256)


def test_the_chosen_clamp_can_be_written_as_text() -> None:
    codec = compressors.make("thc:p=None")
    assert codec.options["p"] is None
    assert spec_of(codec) == "thc:p=None"


@pytest.mark.parametrize(("world_size", "bound"), [(16, 0.3 * 0.0076), (64, 0.15 * 0.0070)])
def test_the_error_of_copies_with_heavy_tails_falls_with_the_ranks_if_the_clamp_is_chosen(
    world_size: int, bound: float
) -> None:
    """The bounds are shares of the errors with p = 1/32."""
    grad = heavy_tailed(1 << 14)
    assert nmse(aggregated(thc(p=None), [grad] * world_size), grad) < bound


def test_a_payload_takes_half_a_byte_an_element_and_a_norm_a_block() -> None:
    codec = thc(granularity=30)
    assert codec.max_encoded_bytes(TensorSpec((1 << 20,))) == (1 << 19) + 4 * 1024
    assert codec.max_encoded_bytes(TensorSpec((1025,))) == 512 + 1 + 8
    assert codec.accumulator_size(TensorSpec((1100,))) == 1024 + 128 + 1
    assert compressors.make("uthc", rotate="none").accumulator_size(TensorSpec((1100,))) == 1101


def test_lanes_of_more_payloads_than_ranks_are_refused() -> None:
    codec, grad = thc(), normal(100)
    stats = reduced(codec, [grad])
    lanes = np.zeros(codec.accumulator_size(TensorSpec((100,))), np.uint8)
    lanes[-1] = 5
    with pytest.raises(PayloadError, match="a sum of at most 4 payloads, got 5"):
        codec.finalize(lanes, 4, context(grad), stats, torch.empty(100))


@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(0, 60), st.integers(1, 12), st.sampled_from(["block", "full", "none"]))
def test_the_sum_decodes_to_the_sum_of_what_payloads_decode_to(bits: int, more: int, num: int, rotate: str) -> None:
    """Definition 3, exactly: integers add up to integers, and a decoded element is one rounding from an integer.

    In units of half a level over the root of the block, elements are integers before and after the transform, so the
    decodes' can be read from what each payload decodes to. They add up to those that the sum decodes to, to the bit.
    """
    codec = thc(bits=bits, granularity=2**bits - 1 + more, block=64, rotate=rotate)
    grads = [normal(550, seed=rank) * (rank + 1) for rank in range(num)]
    ctxs, stats = [context(grad, rank=rank, world_size=num) for rank, grad in enumerate(grads)], reduced(codec, grads)
    payloads = [codec.encode(grad, ctx, stats) for grad, ctx in zip(grads, ctxs, strict=True)]
    shape = codec.accumulator_size(TensorSpec((550,)))
    each = [
        accumulated(codec, payload, ctx, np.zeros(shape, codec.accumulator_dtype(num)))
        for payload, ctx in zip(payloads, ctxs, strict=True)
    ]
    lanes = np.zeros(shape, codec.accumulator_dtype(num))
    for payload, ctx in zip(payloads, ctxs, strict=True):
        codec.accumulate(payload, ctx, lanes)
    assert np.array_equal(lanes, np.sum(each, axis=0, dtype=np.int64))
    assert all(set(lane[:-1]) <= set(codec.table(num).values) for lane in each)

    blocks = [(512, 512), (38, 64)] if rotate == "full" else [(64, 64)] * 8 + [(38, 64)]
    if rotate == "none":
        blocks = [(count, 1) for count, _ in blocks]
    level = 2 * codec.table(num).threshold / codec.lookup_table(num).granularity
    units = np.repeat(
        [
            np.float32(rms / math.sqrt(length) * level)
            for rms, (_, length) in zip(stats[0].astype(float), blocks, strict=True)
        ],
        [count for count, _ in blocks],
    )
    halves = []
    for payload, ctx in zip(payloads, ctxs, strict=True):
        found = codec.decode(payload, ctx, stats=stats).numpy().astype(np.float64) / units * 2
        assert np.abs(found - np.rint(found)).max() < 1e-2
        halves.append(np.rint(found))
    expected = np.sum(halves, axis=0).astype(np.float32) / 2 * units  # exact but for the product
    found = codec.finalize(lanes, num, ctxs[0], stats, torch.empty(550))
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("codec", "most", "advice"),
    [(thc(granularity=32), 1024, "block=512, a table with a granularity of at most 31, or use fewer ranks"),
     (compressors.make("uthc", bits=1, block=1 << 15), 1024, "block=16384, a table with"),
     (thc(granularity=64, bits=2, rotate="none"), 1 << 18, r"Pass a table with a granularity of at most 63, or")],
    ids=repr,
)  # fmt: skip
def test_as_many_ranks_are_accepted_as_add_up_exactly(codec: Homomorphic, most: int, advice: str) -> None:
    codec.derived_config(most)
    with pytest.raises(OptionError, match=f"does not add up exactly on {most + 1} ranks.*{advice}"):
        codec.derived_config(most + 1)
    block, largest = codec.block, most * codec.max_contribution(most)
    sums = np.full(block + 1, largest, codec.accumulator_dtype(most))
    sums[-2:] = largest - 1, most
    ctx, grad = context(torch.empty(block), world_size=most), torch.empty(block)
    stats = [np.float32([1 if reduction == "max" else -1]) for reduction in codec.reductions]
    found = codec.finalize(sums, most, ctx, stats, grad).numpy()
    exact = sums[:-1] - largest / 2
    if codec.rotate == "block":
        hadamard(exact, block)  # in float64
    factor = found[block // 2] / exact[block // 2]
    assert np.array_equal(np.abs(found), np.abs(exact.astype(np.float32) * np.abs(np.float32(factor))))


def test_full_rotation_promises_no_exact_sums_and_refuses_no_ranks() -> None:
    assert thc(rotate="full", granularity=32).derived_config(1 << 20)["accumulator"] == "uint32"


def test_blocks_may_have_sums_of_different_numbers_of_payloads() -> None:
    """As with partial aggregation: the counter equals the number of payloads added."""
    codec, grads = thc(granularity=30, block=64), [normal(192, seed=rank) for rank in range(3)]
    stats = reduced(codec, grads)
    ctxs = [context(grad, rank=rank) for rank, grad in enumerate(grads)]
    payloads = [codec.encode(grad, ctx, stats) for grad, ctx in zip(grads, ctxs, strict=True)]
    like = np.zeros(193, np.uint8)
    each = [accumulated(codec, payload, ctx, like)[:-1] for payload, ctx in zip(payloads, ctxs, strict=True)]
    lanes = np.concatenate([each[0][:64], (each[0] + each[1])[64:128], sum(each)[128:]])
    out = codec.finalize_blocks(lanes, np.array([1, 2, 3]), ctxs[0], stats, torch.empty(192))
    decoded = [codec.decode(payload, ctx, stats=stats) for payload, ctx in zip(payloads, ctxs, strict=True)]
    expected = torch.cat([decoded[0][:64], (decoded[0] + decoded[1])[64:128], sum(decoded)[128:]])
    assert torch.allclose(out, expected, atol=1e-5)


# -- error --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "granularity", "p"), [(4, 30, 1 / 32), (4, 51, 1 / 1024), (3, 14, 1 / 32), (2, 6, 0.1)]
)
def test_the_error_of_one_rank_is_the_tables_cost_and_what_clamping_takes(bits, granularity, p) -> None:
    codec, grad = thc(bits=bits, granularity=granularity, p=p), normal(1 << 18)
    expected = codec.table(1).cost + clamped_error(p)
    assert nmse(torch.from_numpy(sent(codec, grad)), grad) == pytest.approx(expected, rel=0.02)
    # Blocks that a few elements make up rotate to values of two signs and little else: few of them are clamped.
    heavy = heavy_tailed(1 << 18)
    assert nmse(torch.from_numpy(sent(codec, heavy)), heavy) < 1.05 * expected


def test_the_error_of_a_mean_falls_with_the_ranks() -> None:
    """With copies of one gradient, rounding averages out, but clamping does not, since all ranks clamp the same."""
    grad, codec = normal(1 << 16), thc(granularity=30)
    for world_size in (1, 4, 8):
        expected = codec.table(world_size).cost / world_size + clamped_error(1 / 32)
        assert nmse(aggregated(codec, [grad] * world_size), grad) == pytest.approx(expected, rel=0.03)


def test_without_clamping_it_is_unbiased() -> None:
    """The mean over the private stream with one rotation, by Hoeffding's bound with 1e-6 false alarms."""
    grad, draws, codec = normal(512), 300, thc(granularity=30, p=2**-40, block=512)
    decoded = np.stack([sent(codec, grad, rank=rank) for rank in range(draws)]).astype(np.float64)
    (rms,) = reduced(codec, [grad])
    step = 2 * threshold(2**-40) / 30 * float(rms[0])
    widest = max(np.diff(codec.table(4).values)) * step  # of what a coordinate can be rounded to
    # An element is a sum of 512 coordinates over the root of 512.
    bound = widest * math.sqrt(math.log(2 * 512 / 1e-6) / (2 * draws))
    assert np.abs(decoded.mean(0) - grad.numpy()).max() < bound


@pytest.mark.parametrize("rotate", ["block", "full", "none"])
def test_feedback_keeps_the_residual_small_and_loses_nothing(rotate: str) -> None:
    """The clamped part is sent later. Ranks share norms, and one gradient is ten times as large as the other."""
    codec, world_size, size = thc(granularity=30, rotate=rotate), 2, 3000
    works = [np.zeros(size, np.float32) for _ in range(world_size)]
    produced, applied = np.zeros(size), np.zeros(size)
    for step in range(60):
        grads = [normal(size, seed=100 * step + rank) * 10.0**rank + 1 for rank in range(world_size)]
        ctxs = [context(grad, rank=rank, step=step, world_size=world_size) for rank, grad in enumerate(grads)]
        for grad, work in zip(grads, works, strict=True):
            work += grad.numpy()
        stats = reduced(codec, [torch.from_numpy(work) for work in works])
        for work, ctx in zip(works, ctxs, strict=True):
            payload = codec.encode(torch.from_numpy(work), ctx, stats, residual_out=work)
            applied += codec.decode(payload, ctx, stats=stats).numpy()
        produced += sum(grad.numpy().astype(np.float64) for grad in grads)
    assert np.abs(produced - applied - sum(works)).max() < 1e-2
    assert all(np.square(work).mean() < 0.1 * 101 for work in works)


@given(st.integers(1, 1 << 24))
def test_full_rotation_pads_by_a_sixteenth_at_most(size: int) -> None:
    """In 16 blocks or fewer, the same on all ranks: they follow from the length alone."""
    codec, spec = thc(bits=8, rotate="full"), TensorSpec((size,))
    ((num_blocks, _),) = codec.stats_spec(spec)
    most = size + max(size // 16, 31)
    assert num_blocks <= 16
    assert size <= codec.accumulator_size(spec) - 1 <= most
    assert codec.max_encoded_bytes(spec) <= most + 4 * 16


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 50_000])
def test_full_rotation_has_the_tables_error_at_any_length(size: int) -> None:
    codec = thc(granularity=30, rotate="full")
    expected = codec.table(1).cost + clamped_error(1 / 32)
    errors = [nmse(torch.from_numpy(sent(codec, grad)), grad) for grad in (normal(size), heavy_tailed(size))]
    assert errors[0] == pytest.approx(expected, rel=0.03)
    assert errors[1] < 1.05 * expected


# -- rotation, options, edges -------------------------------------------------------------------------------------


def test_all_ranks_rotate_alike_and_each_step_anew() -> None:
    codec, grad = thc(granularity=30), torch.eye(1, 1024)[0]
    rotations = {
        key: codec.encode(grad, context(grad, **fields)).body[4:].tobytes()
        for key, fields in {"one": {}, "step": {"step": 9}, "seed": {"seed": 9}, "offset": {"offset": 2048}}.items()
    }
    assert len(set(rotations.values())) == 4
    # Of one element the coordinates are all at plus or minus one: the same on all ranks up to rounding.
    lanes = [
        accumulated(codec, codec.encode(grad, context(grad, rank=rank), [np.float32([1 / 32])]), context(grad),
                    np.zeros(1025, np.uint8)) > 15
        for rank in range(2)
    ]  # fmt: skip
    assert np.array_equal(lanes[0], lanes[1])


def test_a_range_rotates_as_the_whole_does_there() -> None:
    codec, grad = thc(granularity=30), normal(4096)
    whole = sent(codec, grad)
    for start in (1024, 2048):
        part = grad[start : start + 1024]
        assert np.array_equal(sent(codec, part, offset=start), whole[start : start + 1024])


@pytest.mark.parametrize("name", ["thc", "uthc"])
@pytest.mark.parametrize("rotate", ["block", "full", "none"])
@pytest.mark.parametrize("edge", EDGE_TENSORS)
def test_edges_are_defined_with_every_rotation(name: str, rotate: str, edge: str) -> None:
    codec, grad = compressors.make(name, rotate=rotate, bits=4, block=64), EDGE_TENSORS[edge]()
    payload = codec.encode(grad, context(grad))
    found = codec.decode(payload, context(grad))
    assert not payload.nonfinite and found.isfinite().all()
    assert found.shape == grad.shape and found.dtype == grad.dtype
    assert grad.numel() == 0 or grad.any() or not found.any()


@pytest.mark.parametrize("name", ["thc", "uthc"])
def test_the_largest_floats_neither_overflow_nor_are_marked(name: str) -> None:
    """Sums that overflow are clamped to float32."""
    grad = torch.full((4096,), torch.finfo(torch.float32).max)
    codec, residual = compressors.make(name), np.empty(4096, np.float32)
    payload = codec.encode(grad, context(grad), residual_out=residual)
    assert not payload.nonfinite
    assert codec.decode(payload, context(grad)).isfinite().all() and np.isfinite(residual).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"block": 1000}, "power of two, not 1000. Pass 1024"), ({"block": 32}, "block must be from 64"),
     ({"rotate": "some"}, "one of block, full, none"), ({"granularity": 14}, "granularity must be from 15"),
     ({"bits": 9}, "bits must be from 2 to 8"), ({"bits": 1}, "bits must be from 2 to 8"), ({"p": 0.0}, "p <= 0.5"),
     ({"accumulator_bits": 12}, "8, 16, 32 or None")],
)  # fmt: skip
def test_impossible_options_are_refused_with_advice(options, said) -> None:
    with pytest.raises(OptionError, match=said):
        thc(**options)
