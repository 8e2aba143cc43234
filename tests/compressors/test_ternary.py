"""Ternary values against the paper's own words, against 3LC by hand, and at the edges of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError
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


@pytest.mark.parametrize("largest", [TINY, 2 * TINY, 3 * TINY, 5 * TINY, 3e38, MAX])
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_the_largest_element_is_never_rounded_to_zero(largest: float, sparsity: float) -> None:
    found = sent(traced("ternary", sparsity=sparsity), torch.tensor([0.0, -largest, 0.0]))
    assert found[1] <= -np.float32(largest)
    assert np.isfinite(found).all() and not found[[0, 2]].any()


def test_a_payload_is_a_scale_and_a_fifth_of_a_byte_an_element() -> None:
    assert body(traced("ternary"), normal(1001)).nbytes == 4 + 201
    assert body(traced("ternary"), torch.zeros(1001)).nbytes == 4 + 201


@pytest.mark.parametrize("sparsity", [0.99, 2.0])
def test_sparsity_has_its_bounds(sparsity: float) -> None:
    with pytest.raises(OptionError, match="Expected 1 <= sparsity < 2"):
        traced("ternary", sparsity=sparsity)
