import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import cpu, reference
from tests.kernels.samples import BACKENDS, assert_same

STREAMS = [("random16", np.uint16), ("random32", np.uint32)]


def draw(kernels, name: str, key: int, first: int, length: int) -> np.ndarray:
    out = np.empty(length, dict(STREAMS)[name])
    getattr(kernels, name)(key, first, out)
    return out


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        # The known answers of Random123 (kat_vectors, philox4x32 7) whose upper two counter words are zero.
        (0, 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ],
)
def test_philox_known_answers(kernels, key, counter, words):
    out = np.empty(4, np.uint32)
    kernels.philox(key, counter, out)
    assert out.tolist() == words


def test_philox_of_the_oracle_with_all_counter_words():
    # The known answers for 10 rounds need all four counter words, which only the oracle's inner function takes.
    all_ones = np.array([0xFFFFFFFF], np.uint64)
    words = reference.random.philox_words((all_ones,) * 4, 0xFFFFFFFFFFFFFFFF, rounds=10)
    assert [int(word[0]) for word in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = [np.array([word], np.uint64) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = reference.random.philox_words(tuple(counter), 0x299F31D0A4093822, rounds=10)
    assert [int(word[0]) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(key=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**64 - 1), count=st.integers(0, 40))
def test_philox_agrees(key, counter, count):
    got, want = np.empty(4 * count, np.uint32), np.empty(4 * count, np.uint32)
    cpu.philox(key, counter, got)
    reference.philox(key, counter, want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", dict(STREAMS))
@given(key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**48), length=st.integers(0, 4000))
def test_streams_agree(name, key, first, length):
    assert_same(draw(cpu, name, key, first, length), draw(reference, name, key, first, length))


@pytest.mark.parametrize("name", dict(STREAMS))
@pytest.mark.parametrize("kernels", BACKENDS)
@given(start=st.integers(0, 5000), length=st.integers(0, 3000))
def test_a_range_is_a_slice_of_the_whole(kernels, name, start, length):
    whole = draw(kernels, name, 42, 7, start + length)
    assert_same(draw(kernels, name, 42, 7 + start, length), whole[start:])


@pytest.mark.parametrize("kernels", BACKENDS)
def test_elements_map_to_words_as_documented(kernels):
    words = np.empty(4 * 256, np.uint32)
    kernels.philox(9, 0, words)
    words = words.reshape(256, 4)
    halves, whole = draw(kernels, "random16", 9, 0, 2048), draw(kernels, "random32", 9, 0, 1024)
    for element in (0, 1, 127, 128, 300, 1023, 1024, 2047):
        s, v = element % 1024 // 128, element % 128
        word = int(words[element // 1024 * 128 + v, s // 2])
        assert halves[element] == (word >> 16 * (s % 2)) & 0xFFFF
    for element in (0, 127, 128, 511, 512, 1023):
        s, v = element % 512 // 128, element % 128
        assert whole[element] == words[element // 512 * 128 + v, s]


def test_values_are_uniform_and_keys_independent():
    a, b = draw(cpu, "random16", 1, 0, 1 << 20), draw(cpu, "random16", 2, 0, 1 << 20)
    # Mean of 2^20 uniforms: a standard deviation of 18.5; five of them have a false-alarm rate of 6e-7. The
    # inputs are fixed, so the test cannot flicker.
    assert abs(a.mean(dtype=np.float64) - 32767.5) < 5 * 18.5
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 1024
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 5 / 1024
    counts = np.bincount(a >> 8, minlength=256)
    assert abs(((counts - 4096) ** 2 / 4096).sum() - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_philox_takes_whole_counters(kernels):
    with pytest.raises(ValueError, match="Expected out of a multiple of 4 elements, got 5"):
        kernels.philox(0, 0, np.empty(5, np.uint32))
