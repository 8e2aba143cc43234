"""Ternary values against the paper, against `threelc`, and at the edges of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, PayloadError
from gradwire.wire.payload import Payload
from tests.compressors.harness import body, sent, traced
from tests.contracts.compressor_cases import float32_context, heavy_tailed, normal

SPARSITIES = [1.0, 1.5, 1.75, 1.9999999]
MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)
TENSORS = {
    "heavy-tailed": heavy_tailed(1001),
    "half precision": normal(300).half(),
    "bfloat16": normal(300).bfloat16(),
    "double precision": normal(300).double() / 3,
    "few subnormals": torch.arange(-7, 8) * TINY,
    "subnormals": torch.from_numpy(np.random.default_rng(0).integers(-999, 1000, 500).astype(np.float32)) * TINY,
    "at the normal limit": normal(300) * 1e-38,
    "largest": torch.tensor([MAX, -MAX / 2, 1.0, -MAX, MAX * 0.75]),
    "zeros": torch.zeros(7),
}


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_values_are_those_of_equations_1_to_3(sparsity: float) -> None:
    grad = heavy_tailed(1000)
    M = float(np.float32(float(grad.abs().max()) * sparsity))
    expected = M * np.rint(grad.double().numpy() / M)
    assert np.array_equal(sent(traced("ternary", sparsity=sparsity), grad), expected)


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("name", TENSORS)
def test_values_are_those_of_3lc_by_hand(name: str, sparsity: float) -> None:
    grad = TENSORS[name]
    ctx = float32_context(grad)
    found, by_hand = (
        codec.decode(codec.encode(grad, ctx), ctx)
        for codec in (traced("ternary", sparsity=sparsity), compressors.make("threelc", sparsity=sparsity))
    )
    assert torch.equal(found, by_hand)


@pytest.mark.parametrize("zero_run", [False, True])
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("name", TENSORS)
def test_fitted_values_are_those_of_the_least_error(name: str, sparsity: float, zero_run: bool) -> None:
    grad = TENSORS[name]
    ctx = float32_context(grad)
    options = {"zero_run": zero_run, "fit": False}, {"zero_run": zero_run, "fit": True}
    codecs = [traced("ternary", sparsity=sparsity, **each) for each in options]
    plain, found = (codec.decode(codec.encode(grad, ctx), ctx).numpy() for codec in codecs)
    chosen = plain != 0
    assert np.array_equal(np.sign(found), np.sign(plain))
    magnitudes = np.abs(grad.double().numpy()[chosen])
    assert np.abs(found[chosen]) == pytest.approx(magnitudes.mean() if chosen.any() else 0, rel=1e-6, abs=TINY)


@pytest.mark.parametrize("largest", [TINY, 2 * TINY, 3 * TINY, 5 * TINY, 3e38, MAX])
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_the_largest_element_is_never_rounded_to_zero(largest: float, sparsity: float) -> None:
    found = sent(traced("ternary", sparsity=sparsity), torch.tensor([0.0, -largest, 0.0]))
    assert found[1] <= -np.float32(largest)
    assert np.isfinite(found).all() and not found[[0, 2]].any()


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("name", TENSORS)
def test_zero_runs_change_the_size_and_no_value(name: str, sparsity: float) -> None:
    grad = TENSORS[name]
    ctx = float32_context(grad)
    plain, runs = traced("ternary", sparsity=sparsity), traced("ternary", sparsity=sparsity, zero_run=True)
    payloads = plain.encode(grad, ctx), runs.encode(grad, ctx)
    assert payloads[1].nbytes <= payloads[0].nbytes
    assert torch.equal(runs.decode(payloads[1], ctx), plain.decode(payloads[0], ctx))


@pytest.mark.parametrize("size", [0, 1, 5, 64, 1001, 5119, 5120])
@pytest.mark.parametrize("zero_run", [False, True])
def test_bodies_of_one_chunk_are_those_of_3lc_by_hand(size: int, zero_run: bool) -> None:
    for grad in (heavy_tailed(size), normal(size), torch.zeros(size)):
        by_hand = compressors.make("threelc", sparsity=1.5, zero_run=zero_run)
        found = body(traced("ternary", sparsity=1.5, zero_run=zero_run), grad)
        assert found.tobytes() == body(by_hand, grad).tobytes()


def test_larger_bodies_have_other_planes() -> None:
    """`threelc` has five planes per tensor, the language five per chunk, as the module documents."""
    grad = normal(5121)
    assert body(traced("ternary", zero_run=True), grad).tobytes() != body(compressors.make("threelc"), grad).tobytes()


def test_a_tensor_of_zeros_takes_a_280th() -> None:
    """3LC, section 3.3: all techniques together reach a ratio of 280 on zeros, without the scale's four bytes."""
    assert body(traced("ternary", zero_run=True), torch.zeros(280_000)).nbytes == 4 + 4 * 280_000 // 280


def test_runs_that_do_not_make_up_the_tensor_are_refused() -> None:
    codec, grad = traced("ternary", zero_run=True), torch.zeros(1001)
    payload = codec.encode(grad, float32_context(grad))
    assert bytes(payload.body[4:]) == bytes([255] * 14 + [243 + 3])
    for wrong in (payload.body[:-1], np.append(payload.body, np.uint8(121)), payload.body[:3]):
        with pytest.raises(PayloadError, match=r"whole runs.*in a ternary payload"):
            codec.decode(Payload(wrong), float32_context(grad))
    with pytest.raises(PayloadError, match=r"at most 205 bytes, got 206"):
        codec.decode(Payload(np.zeros(206, np.uint8)), float32_context(grad))


def test_a_payload_is_a_scale_and_a_fifth_of_a_byte_an_element() -> None:
    assert body(traced("ternary"), normal(1001)).nbytes == 4 + 201
    assert body(traced("ternary"), torch.zeros(1001)).nbytes == 4 + 201


@pytest.mark.parametrize("sparsity", [0.99, 2.0])
def test_sparsity_has_its_bounds(sparsity: float) -> None:
    with pytest.raises(OptionError, match="1 <= sparsity < 2"):
        traced("ternary", sparsity=sparsity)
