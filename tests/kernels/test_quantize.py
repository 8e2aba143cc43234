import math

import numpy as np
import pytest

from tests.kernels.samples import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    assert_backends_agree,
    assert_same,
    empty,
    gradients,
    random_normal,
)


def scales_of(kernels, x: np.ndarray, block: int) -> np.ndarray:
    scales = empty(math.ceil(x.size / block), "float32")
    kernels.block_abs_max(x, block, scales)
    return scales / np.float32(127)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_agrees(dtype, length, stochastic):
    for x in gradients(dtype, length):
        for block, first in ((1024, 0), (1024, 5000), (100, 1023), (16, 3)):

            def call(kernels, x=x, block=block, first=first):
                scales = scales_of(kernels, x, block)
                q, alone, residual = empty(length, "int8"), empty(length, "int8"), empty(length, "float32")
                kernels.quantize_int8(x, scales, block, 11, first, q, stochastic, residual)
                kernels.quantize_int8(x, scales, block, 11, first, alone, stochastic)
                return [scales, q, alone, residual]

            assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_scales_that_cannot_be_inverted_quantize_to_zero(kernels):
    x = np.full(7, 1e-40, np.float32)
    scales = np.array([0, -1, np.inf, np.nan, 1e-45, 1e-39, 1e-41], np.float32)
    q, residual = np.empty(7, np.int8), np.empty(7, np.float32)
    kernels.quantize_int8(x, scales, 1, 0, 0, q, False, residual)
    assert not q.any()
    assert residual[0] == x[0]


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("length", [1, 100, 1024, 5003])
def test_residual_is_what_decoding_lacks(kernels, stochastic, length):
    x = random_normal(length)
    scales, q, out = scales_of(kernels, x, 1024), empty(length, "int8"), empty(length, "float32")
    residual = x.copy()
    kernels.quantize_int8(residual, scales, 1024, 3, 0, q, stochastic, residual)
    kernels.dequantize_int8(q, scales, 1024, out)
    np.testing.assert_array_equal(residual, x - out)
    step = np.repeat(scales, 1024)[:length]
    assert (np.abs(residual) <= step * (1.001 if stochastic else 0.501)).all()


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_range_quantizes_as_the_whole_does(kernels):
    x = random_normal(5000)
    scales, whole = scales_of(kernels, x, 1000), np.empty(5000, np.int8)
    kernels.quantize_int8(x, scales, 1000, 5, 77, whole, True)
    part = np.empty(3000, np.int8)
    kernels.quantize_int8(x[1000:4000], scales[1:4], 1000, 5, 77 + 1000, part, True)
    np.testing.assert_array_equal(part, whole[1000:4000])


def test_stochastic_rounding_is_unbiased():
    # 2^18 elements of one value; the mean has a standard deviation of sqrt(p (1 - p) / 2^18) steps. Five of them
    # have a false-alarm rate of 6e-7 a value; keys are fixed, so the test cannot flicker.
    length = 1 << 18
    for value in (0.0, 0.1, 0.25, 0.5, 0.99, -0.3, -7.25, 126.6):
        x, q = np.full(length, value, np.float32), np.empty(length, np.int8)
        scales = np.ones(math.ceil(length / 1024), np.float32)
        BACKENDS[0].quantize_int8(x, scales, 1024, 1234, 0, q, True)
        p = value % 1
        # 16 random bits place p to 2^-16; rounding of x + u to float32 near 128 adds 2^-17.
        assert abs(q.mean() - value) <= 5 * math.sqrt(p * (1 - p) / length) + 2**-16
        assert set(np.unique(q)) <= {math.floor(value), math.ceil(value)}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block", [16, 100, 1024])
def test_decoders_agree(length, block):
    rng = np.random.default_rng(length)
    q = [rng.integers(-128, 128, length).astype(np.int8) for _ in range(3)]
    scales = [random_normal(math.ceil(length / block), seed=rank) for rank in range(3)]

    def call(kernels):
        out, added, summed = empty(length, "float32"), random_normal(length), empty(length, "float32")
        kernels.dequantize_int8(q[0], scales[0], block, out)
        kernels.dequantize_int8(q[1], scales[1], block, added, accumulate=True)
        kernels.dequantize_int8_sum(q, scales, block, summed)
        return [out, added, summed]

    assert_backends_agree(call)


@pytest.mark.parametrize("narrow", ["int8", "int16", "int32"])
@pytest.mark.parametrize("wide", ["int16", "int32"])
@pytest.mark.parametrize("length", [0, 1, 17, 1025])
def test_lanes_agree_and_are_exact(narrow, wide, length):
    if np.dtype(narrow).itemsize > np.dtype(wide).itemsize:
        with pytest.raises(TypeError, match="Expected an accumulator at least as wide as int32, got int16"):
            BACKENDS[0].add_int8(np.zeros(1, narrow), np.zeros(1, wide))
        return
    rng = np.random.default_rng(length)
    parts = [rng.integers(-127, 128, length).astype(narrow) for _ in range(5)]
    scales = random_normal(math.ceil(length / 100))

    def call(kernels):
        lanes, out = np.zeros(length, wide), empty(length, "float32")
        for part in parts:
            kernels.add_int8(part, lanes)
        kernels.finalize_int8(lanes, scales, 100, 0.2, out)
        np.testing.assert_array_equal(lanes, np.sum(parts, axis=0))
        return [lanes, out]

    assert_backends_agree(call)


def test_lowered_lanes_are_the_mean_of_the_decoded():
    rng = np.random.default_rng(0)
    q = [rng.integers(-127, 128, 2048).astype(np.int8) for _ in range(4)]
    scales, lanes = np.array([0.5, 0.25], np.float32), np.zeros(2048, np.int16)
    out, summed = np.empty(2048, np.float32), np.empty(2048, np.float32)
    for kernels in BACKENDS:
        lanes[:] = 0
        for payload in q:
            kernels.add_int8(payload, lanes)
        kernels.finalize_int8(lanes, scales, 1024, 0.25, out)
        kernels.dequantize_int8_sum(q, [scales] * 4, 1024, summed)
        assert_same(out, summed * np.float32(0.25))


@pytest.mark.parametrize("kernels", BACKENDS)
def test_wrong_lengths_are_refused(kernels):
    x, q, scales = np.zeros(100, np.float32), np.zeros(100, np.int8), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="Expected scales of 4 elements, got 1"):
        kernels.quantize_int8(x, scales, 32, 0, 0, q, False)
    with pytest.raises(ValueError, match="Expected q of 100 elements, got 99"):
        kernels.dequantize_int8(q[1:], scales, 128, x)
    with pytest.raises(ValueError, match="Expected scales of 2 elements, got 1"):
        kernels.dequantize_int8_sum([q], [scales], 64, x)
