import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.kernels import cpu, reference
from tests.kernels.samples import BACKENDS, assert_backends_agree

# Runs and literals in any mix, longer than the vectors that the compiled kernel takes at once.
PIECES = st.lists(
    st.one_of(
        st.integers(1, 200).map(lambda count: bytes([121]) * count),
        st.binary(max_size=80).map(lambda data: bytes(byte % 243 for byte in data)),
    ),
    max_size=8,
).map(b"".join)


def encode(kernels, data: bytes) -> bytes:
    guarded = np.full(len(data) + 32, 7, np.uint8)
    length = kernels.zero_run_encode(np.frombuffer(data, np.uint8), guarded[16 : 16 + len(data)])
    assert (guarded[:16] == 7).all()
    assert (guarded[16 + len(data) :] == 7).all()
    return guarded[16 : 16 + length].tobytes()


def decode(kernels, data: bytes, size: int) -> bytes | None:
    guarded = np.full(size + 32, 7, np.uint8)
    length = kernels.zero_run_decode(np.frombuffer(data, np.uint8), guarded[16 : 16 + size])
    assert (guarded[:16] == 7).all()
    assert (guarded[16 + size :] == 7).all()
    assert length in (size, -1)
    return guarded[16 : 16 + size].tobytes() if length >= 0 else None


@given(data=PIECES)
def test_round_trip(data):
    encoded = encode(cpu, data)
    assert encoded == encode(reference, data)
    assert len(encoded) <= len(data)
    for kernels in BACKENDS:
        assert decode(kernels, encoded, len(data)) == data
        assert decode(kernels, encoded, len(data) + 1) is None
        if data:
            assert decode(kernels, encoded, len(data) - 1) is None


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize(
    ("run", "encoded"),
    [(1, [121]), (2, [243]), (13, [254]), (14, [255]), (15, [255, 121]), (28, [255, 255]), (30, [255, 255, 243])],
)
def test_runs_are_cut_into_maximal_ones_first(kernels, run, encoded):
    assert list(encode(kernels, bytes([5] + [121] * run + [6]))) == [5, *encoded, 6]


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize(
    "tokens", [[121, 121], [121, 243], [243, 121], [243, 243], [254, 255], [121, 255], [5, 254, 121]]
)
def test_a_second_encoding_of_the_same_bytes_is_refused(kernels, tokens):
    size = sum(token - 241 if token >= 243 else 1 for token in tokens)
    assert decode(kernels, bytes(tokens), size) is None


@given(data=st.binary(max_size=300), size=st.integers(0, 400))
@example(data=bytes([255] * 100), size=1400)
@example(data=bytes([255] * 100), size=1399)
@example(data=b"", size=0)
def test_any_bytes_stay_in_bounds_and_what_is_accepted_is_canonical(data, size):
    decoded = decode(cpu, data, size)
    assert decoded == decode(reference, data, size)
    if decoded is not None:
        assert encode(cpu, decoded) == data


@pytest.mark.parametrize("probability", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 5003])
def test_backends_agree(probability, length):
    rng = np.random.default_rng(length)
    data = np.where(rng.random(length) < probability, 121, rng.integers(0, 243, length)).astype(np.uint8)

    def call(kernels):
        encoded, out = np.empty(length, np.uint8), np.empty(length, np.uint8)
        count = kernels.zero_run_encode(data, encoded)
        assert kernels.zero_run_decode(encoded[:count], out) == length
        return [encoded[:count].copy(), out]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_short_buffer_is_refused(kernels):
    with pytest.raises(ValueError, match="Expected out of at least 3 elements, got 2"):
        kernels.zero_run_encode(np.zeros(3, np.uint8), np.empty(2, np.uint8))
