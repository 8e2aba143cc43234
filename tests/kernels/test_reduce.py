import math

import numpy as np
import pytest

from tests.kernels.samples import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    assert_backends_agree,
    empty,
    gradients,
    random_normal,
)

# Across one and two levels of sums of sums.
SUM_LENGTHS = [*LENGTHS, 1024 * 1024 - 1, 1024 * 1024, 1024 * 1024 + 1, 1024 * 1025 + 7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_extremes_agree(dtype, length):
    for x in gradients(dtype, length):
        assert_backends_agree(lambda kernels, x=x: [*kernels.min_max(x), kernels.abs_max(x)])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_agree(dtype, length):
    for x in gradients(dtype, length):
        assert_backends_agree(
            lambda kernels, x=x: [kernels.block_sum(x), kernels.mean(x), kernels.norm(x), *kernels.sign_means(x)]
        )


@pytest.mark.parametrize("length", SUM_LENGTHS)
def test_long_sums_agree(length):
    x = random_normal(length)
    assert_backends_agree(lambda kernels: [kernels.block_sum(x), kernels.norm(x), *kernels.sign_means(x)])


@pytest.mark.parametrize("kernels", BACKENDS)
def test_sum_is_in_the_documented_order(kernels):
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
    assert kernels.block_sum(x) == (blocks[0] + blocks[2]) + blocks[1]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_values(kernels):
    x = np.array([3, -1, -0.0, -2, 5], np.float32)
    assert kernels.abs_max(x) == 5
    assert kernels.min_max(x) == (-2, 5)
    assert kernels.mean(x) == 1
    assert kernels.norm(x) == np.float32(math.sqrt(39))
    low, high, num_high = kernels.sign_means(x)
    assert (low, high, num_high) == (-1.5, np.float32(8 / 3), 3)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_empty(kernels):
    x = np.empty(0, np.float32)
    assert kernels.abs_max(x) == 0
    assert kernels.min_max(x) == (0, 0)
    assert kernels.mean(x) == kernels.norm(x) == kernels.block_sum(x) == 0
    assert kernels.sign_means(x) == (0, 0, 0)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_non_finite_is_reported(kernels, bad, place):
    x = random_normal(100)
    x[place] = bad
    assert np.isnan(kernels.abs_max(x))
    assert np.isnan(kernels.min_max(x)).all()
    assert kernels.count_nonfinite(x) == 1
    assert not np.isfinite(kernels.mean(x))
    assert not np.isfinite(kernels.norm(x))
    low, high, _ = kernels.sign_means(x)
    assert not (np.isfinite(low) and np.isfinite(high))
    if np.isnan(bad):
        assert np.isnan(low)
        assert np.isnan(high)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_min_max_knows_the_sign_of_zero(kernels):
    low, high = kernels.min_max(np.array([0.0, -0.0] * 20, np.float32))
    assert np.signbit(low)
    assert not np.signbit(high)
