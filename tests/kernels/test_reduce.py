import math

import numpy as np
import pytest

from gradwire.kernels.reference.reduce import block_sum64
from tests.kernels.samples import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    assert_backends_agree,
    empty,
    gradients,
    random_normal,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_extremes_agree(dtype, length):
    for x in gradients(dtype, length):
        assert_backends_agree(lambda kernels, x=x: [kernels.abs_max(x)])
        assert_backends_agree(lambda kernels, x=x: [kernels.count_nonfinite(x)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block", [1, 16, 100, 1024])
def test_block_abs_max_agrees(dtype, length, block):
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            out = empty(math.ceil(length / block), "float32")
            kernels.block_abs_max(x, block, out)
            return [out]

        assert_backends_agree(call)


def test_sum_is_in_the_documented_order():
    x = random_normal(2 * 1024 + 100)
    padded = np.zeros(3 * 1024)
    padded[: x.size] = x
    blocks = []
    for block in padded.reshape(3, 16, 64):
        lanes = [0.0] * 64
        for row in block:
            lanes = [lane + float(value) for lane, value in zip(lanes, row, strict=True)]
        for half in (32, 16, 8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        blocks.append(lanes[0])
    # Three block results lie in three lanes: 0 + 2 by halving to 2, then + 1.
    assert block_sum64(x.astype(np.float64)) == (blocks[0] + blocks[2]) + blocks[1]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_values(kernels):
    x = np.array([3, -1, -0.0, -2, 5], np.float32)
    assert kernels.abs_max(x) == 5


@pytest.mark.parametrize("kernels", BACKENDS)
def test_empty(kernels):
    x = np.empty(0, np.float32)
    assert kernels.abs_max(x) == 0


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_non_finite_is_reported(kernels, bad, place):
    x = random_normal(100)
    x[place] = bad
    assert np.isnan(kernels.abs_max(x))
    assert kernels.count_nonfinite(x) == 1
