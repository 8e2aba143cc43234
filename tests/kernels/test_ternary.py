import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_packing_agrees(dtype, length):
    for x in gradients(dtype, length):
        for M in (0.0, 1.0, 2.3, 1e-45, np.inf):

            def call(kernels, x=x, M=M):
                packed, alone = (empty(math.ceil(length / 5), "uint8") for _ in range(2))
                residual = empty(length, "float32")
                kernels.pack_ternary(x, M, packed, residual)
                kernels.pack_ternary(x, M, alone)
                return [packed, alone, residual]

            assert_backends_agree(call)


@pytest.mark.parametrize("length", LENGTHS)
def test_unpacking_agrees(length):
    rng = np.random.default_rng(length)
    packed = [rng.integers(0, 243, math.ceil(length / 5)).astype(np.uint8) for _ in range(3)]
    M = np.array([1, 0.3, 5], np.float32)

    def call(kernels):
        out, added, summed = empty(length, "float32"), random_normal(length), empty(length, "float32")
        return [
            kernels.unpack_ternary(packed[0], 0.7, out),
            kernels.unpack_ternary(packed[1], 0.7, added, accumulate=True),
            kernels.unpack_ternary_sum(packed, M, summed),
            out,
            added,
            summed,
        ]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_every_byte_decodes_to_its_digits(kernels):
    packed = np.arange(243, dtype=np.uint8)
    out = np.empty(5 * 243, np.float32)
    assert kernels.unpack_ternary(packed, 1.0, out)
    digits = [[byte // power % 3 - 1 for byte in range(243)] for power in (81, 27, 9, 3, 1)]
    np.testing.assert_array_equal(out, np.concatenate(digits))
    again = np.empty(243, np.uint8)
    kernels.pack_ternary(out, 1.0, again)
    np.testing.assert_array_equal(again, packed)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_round_trip_leaves_the_error_in_the_residual(kernels, length):
    x = random_normal(length)
    residual, out = x.copy(), empty(length, "float32")
    packed = empty(math.ceil(length / 5), "uint8")
    kernels.pack_ternary(residual, 2.0, packed, residual)
    assert kernels.unpack_ternary(packed, 2.0, out)
    np.testing.assert_array_equal(out, np.where(np.abs(x) > 1, 2 * np.sign(x), 0))
    np.testing.assert_array_equal(residual, x - out)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_ties_round_to_zero_and_the_next_float_does_not(kernels):
    half = np.float32(0.35)
    up, down = np.nextafter(half, np.float32(1)), np.nextafter(half, np.float32(0))
    x = np.array([half, -half, up, -up, down], np.float32)
    out, packed = np.empty(5, np.float32), np.empty(1, np.uint8)
    kernels.pack_ternary(x, float(2 * half), packed)
    kernels.unpack_ternary(packed, 1.0, out)
    assert out.tolist() == [0, 0, 1, -1, 0]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_three_halves_round_to_one_where_the_nearest_even_number_is_two(kernels):
    x = np.array([1.5, -1.5, np.nextafter(np.float32(1.5), np.float32(0)), 5, 0], np.float32)
    out, packed = np.empty(5, np.float32), np.empty(1, np.uint8)
    kernels.pack_ternary(x, 1.0, packed)
    kernels.unpack_ternary(packed, 1.0, out)
    assert out.tolist() == [1, -1, 1, 1, 0]
    assert np.rint(x).tolist() == [2, -2, 1, 5, 0]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_half_of_an_odd_subnormal_is_exact(kernels):
    smallest = np.float32(1e-45)
    x = np.array([1, 2, -1, -2, 0], np.float32) * smallest
    out, packed = np.empty(5, np.float32), np.empty(1, np.uint8)
    kernels.pack_ternary(x, float(3 * smallest), packed)  # half of 3 is 1.5, which rounds to 2
    kernels.unpack_ternary(packed, 1.0, out)
    assert out.tolist() == [0, 1, 0, -1, 0]


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("M", [0.0, 4.0])
@pytest.mark.parametrize("length", [1, 4, 6, 11, 1001])
def test_all_zero_is_all_zero_bytes_whatever_the_padding(kernels, M, length):
    x = np.zeros(length, np.float32) if M else random_normal(length)
    residual, packed = np.empty(length, np.float32), empty(math.ceil(length / 5), "uint8")
    kernels.pack_ternary(x, M, packed, residual)
    assert set(packed.tolist()) == {121}
    np.testing.assert_array_equal(residual, x)


@pytest.mark.parametrize("kernels", BACKENDS)
@given(data=st.binary(min_size=1, max_size=200), missing=st.integers(0, 4), accumulate=st.booleans())
def test_any_bytes_stay_in_bounds_and_only_canonical_ones_are_accepted(kernels, data, missing, accumulate):
    packed = np.frombuffer(data, np.uint8)
    length = 5 * packed.size - missing
    guarded = np.full(length + 64, 7, np.float32)
    out = guarded[32 : 32 + length]
    accepted = kernels.unpack_ternary(packed, 0.5, out, accumulate)
    assert (guarded[:32] == 7).all()
    assert (guarded[32 + length :] == 7).all()
    assert np.isfinite(out).all()
    assert kernels.unpack_ternary_sum([packed], np.array([0.5], np.float32), out) == accepted
    again = np.empty_like(packed)
    kernels.pack_ternary(out, 0.5, again)
    assert accepted == bool((again == packed).all())
