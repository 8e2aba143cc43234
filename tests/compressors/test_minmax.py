"""minmax: its levels, and constant gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import UnknownNameError
from tests.contracts.compressor_cases import context, normal


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_an_element_goes_to_one_of_the_two_levels_beside_it(bits) -> None:
    codec, grad = compressors.make("minmax", bits=bits), normal(500)
    found = codec.decode(codec.encode(grad, context(grad)), context(grad)).double().numpy()
    levels = np.linspace(float(grad.min()), float(grad.max()), 2**bits)
    below = levels[np.searchsorted(levels, grad.double().numpy() + 1e-6, side="right") - 1]
    above = levels[np.minimum(np.searchsorted(levels, grad.double().numpy() - 1e-6), 2**bits - 1)]
    assert (np.minimum(abs(found - below), abs(found - above)) < 1e-6).all()


def test_levels_themselves_are_exact() -> None:
    codec, grad = compressors.make("minmax"), torch.tensor([-1.0, 0.0, 1.0, 2.0, 2.0, -1.0])
    assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)


@pytest.mark.parametrize("value", [0.1, -3e38, 1e-44])
def test_a_constant_is_exact(value) -> None:
    codec, grad = compressors.make("minmax"), torch.full((9,), value)
    assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)


def test_the_body_is_two_scalars_and_the_levels() -> None:
    codec, grad = compressors.make("minmax"), torch.tensor([0.0, 3.0, 1.0, 2.0, 0.0])
    body = codec.encode(grad, context(grad)).body
    assert body[:8].view(np.float32).tolist() == [0, 1]
    # Two bytes of planes: elements 0, 2, 4 in the first, 1 and 3 in the second, two bits each from the least.
    assert body[8:].tolist() == [0 | 1 << 2 | 0 << 4, 3 | 2 << 2]


def test_other_widths_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="option of minmax 'bit'"):
        compressors.make("minmax", bit=2)
    with pytest.raises(ValueError, match="bits must be 1, 2, 4 or 8, not 3"):
        compressors.make("minmax", bits=3)
