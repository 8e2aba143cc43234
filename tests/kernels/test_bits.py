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
    untimed,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_signs_agree(dtype, length):
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            packed, residual = empty(math.ceil(length / 8), "uint8"), empty(length, "float32")
            kernels.encode_signs(x, -0.3, 0.4, packed, residual)
            only_packed = empty(math.ceil(length / 8), "uint8")
            kernels.pack_signs(x, only_packed)
            return [packed, only_packed, residual]

        assert_backends_agree(call)


@pytest.mark.parametrize("length", LENGTHS)
def test_unpacked_signs_agree(length):
    rng = np.random.default_rng(length)
    packed = [rng.integers(0, 256, math.ceil(length / 8)).astype(np.uint8) for _ in range(3)]
    low, high = random_normal(3, seed=1), random_normal(3, seed=2)

    def call(kernels):
        out, added, summed = empty(length, "float32"), random_normal(length), empty(length, "float32")
        kernels.unpack_signs(packed[0], -0.1, 0.2, out)
        kernels.unpack_signs(packed[1], -0.1, 0.2, added, accumulate=True)
        kernels.unpack_signs_sum(packed, low, high, summed)
        return [out, added, summed]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_signs_round_trip_and_leave_the_error(kernels, length):
    x = random_normal(length)
    packed, out, residual = empty(math.ceil(length / 8), "uint8"), empty(length, "float32"), x.copy()
    kernels.encode_signs(residual, -1.0, 1.0, packed, residual)
    kernels.unpack_signs(packed, -1.0, 1.0, out)
    np.testing.assert_array_equal(out, np.where(x < 0, -1, 1))
    np.testing.assert_array_equal(residual, x - out)
    assert not np.unpackbits(packed, bitorder="little")[length:].any()


@pytest.mark.parametrize("kernels", BACKENDS)
def test_sum_is_in_rank_order(kernels):
    packed = [np.array([1], np.uint8)] * 3
    levels = np.array([1e8, 1, -1e8], np.float32)
    out = np.empty(1, np.float32)
    kernels.unpack_signs_sum(packed, levels, levels, out)
    assert out[0] == 0  # 1 is lost in 1e8 + 1, not in 1e8 - 1e8 + 1


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_packed_bits_agree(bits, length):
    q = np.random.default_rng(length).integers(0, 256, length).astype(np.uint8)

    def call(kernels):
        packed, out = empty(math.ceil(length * bits / 8), "uint8"), empty(length, "uint8")
        kernels.pack_bits(q, bits, packed)
        kernels.unpack_bits(packed, bits, out)
        return [packed, out]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
@untimed
@given(data=st.binary(max_size=300), bits=st.sampled_from([1, 2, 4, 8]))
def test_bits_round_trip(kernels, data, bits):
    q = np.frombuffer(data, np.uint8) & (2**bits - 1)
    packed, out = np.empty(math.ceil(q.size * bits / 8), np.uint8), np.empty(q.size, np.uint8)
    kernels.pack_bits(q, bits, packed)
    kernels.unpack_bits(packed, bits, out)
    np.testing.assert_array_equal(out, q)
    # Padding is zero: elements k * S + i past the end do not show in byte i.
    for element in range(q.size, packed.size * (8 // bits)):
        plane, i = divmod(element, packed.size)
        assert packed[i] >> (plane * bits) & (2**bits - 1) == 0


@pytest.mark.parametrize("kernels", BACKENDS)
def test_layouts(kernels):
    packed = np.empty(2, np.uint8)
    kernels.pack_signs(np.array([1, -1, 0, -0.0, -2, 3, -4, 5, -1, 6], np.float32), packed)
    assert packed.tolist() == [0b10101101, 0b10]
    kernels.pack_bits(np.array([1, 2, 3, 0, 1, 2, 3], np.uint8), 2, packed)
    # S = 2: byte 0 holds elements 0, 2, 4, 6, byte 1 holds 1, 3, 5 and padding.
    assert packed.tolist() == [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 0 << 2 | 2 << 4]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_wrong_arguments_are_refused(kernels):
    q = np.zeros(9, np.uint8)
    with pytest.raises(ValueError, match="Expected bits to be 1, 2, 4 or 8, got 3"):
        kernels.pack_bits(q, 3, q)
    with pytest.raises(ValueError, match="Expected out of 2 elements, got 9"):
        kernels.pack_bits(q, 1, q)
    with pytest.raises(ValueError, match="Expected packed of 5 elements, got 9"):
        kernels.unpack_bits(q, 4, np.empty(9, np.uint8))
    with pytest.raises(ValueError, match="Expected one entry a rank"):
        kernels.unpack_signs_sum([q], np.zeros(2, np.float32), np.zeros(2, np.float32), np.empty(9, np.float32))
