import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.samples import (
    BACKENDS,
    LENGTHS,
    assert_backends_agree,
    empty,
)


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
def test_layout(kernels):
    packed = np.empty(2, np.uint8)
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
