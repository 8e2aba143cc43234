"""Floats rounded to margins: backends agree, errors keep their bound, and the packed form has one encoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu.parallel import one_thread
from gradwire.kernels.float_format import CHUNK, FORMATS, as_bits
from gradwire.kernels.reference.elements import as_float32
from tests.kernels.samples import BACKENDS
from tests.kernels.test_floats import CODES, DTYPES, in_dtype, samples

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_backend = pytest.mark.parametrize("kernels", BACKENDS)


def margin_samples(size: int) -> list[np.ndarray]:
    """One for all, any, close to the exponents of the samples, none."""
    rng = np.random.default_rng(size)
    return [
        np.full(size, 120, np.uint8),
        rng.integers(0, 256, size).astype(np.uint8),
        rng.integers(100, 135, size).astype(np.uint8),
        np.zeros(size, np.uint8),
    ]


def rounded(kernels, x: np.ndarray, margins: np.ndarray, most: int) -> np.ndarray:
    out = np.empty_like(x)
    kernels.round_floats(x, margins, most, out)
    return out


def pack(kernels, x: np.ndarray, margins: np.ndarray, most: int, dtype: str) -> bytes | None:
    guarded = np.full(x.nbytes + 32, 7, np.uint8)
    length = kernels.pack_rounded(x, margins, most, CODES[dtype], guarded[16 : 16 + x.nbytes])
    assert (guarded[:16] == 7).all()
    assert (guarded[16 + x.nbytes :] == 7).all()
    assert length < x.nbytes
    return guarded[16 : 16 + length].tobytes() if length >= 0 else None


def unpack(kernels, data: bytes, margins: np.ndarray, most: int, dtype: str, like: np.ndarray) -> np.ndarray | None:
    guarded = np.full(like.size + 128, 7, like.dtype)
    out = guarded[64 : 64 + like.size]
    taken = kernels.unpack_rounded(np.frombuffer(data, np.uint8), margins, most, CODES[dtype], out)
    assert (guarded[:64] == 7).all()
    assert (guarded[64 + like.size :] == 7).all()
    return out.copy() if taken else None


@each_dtype
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 513, 2100])
def test_backends_round_and_write_the_same_and_all_bits_come_back(dtype, size):
    step = FORMATS[in_dtype(np.zeros(1, np.float32), dtype).dtype].step
    for x in samples(dtype, size):
        for most in (3 * step + 1, step + 1):
            for margins in margin_samples(size):
                left = rounded(cpu, x, margins, most)
                assert left.tobytes() == rounded(reference, x, margins, most).tobytes()
                assert left.tobytes() == rounded(cpu, left, margins, most).tobytes()
                packed = pack(cpu, left, margins, most, dtype)
                assert packed == pack(reference, left, margins, most, dtype)
                if packed is not None:
                    for kernels in BACKENDS:
                        assert unpack(kernels, packed, margins, most, dtype, left).tobytes() == left.tobytes()


@each_dtype
def test_several_chunks_in_threads_are_those_of_one_thread(dtype):
    size = 40 * CHUNK + 77
    x = in_dtype((np.random.default_rng(1).standard_normal(size) * 0.01).astype(np.float32), dtype)
    margins = np.resize(margin_samples(CHUNK)[2], size)
    left = rounded(cpu, x, margins, 7)
    packed = pack(cpu, left, margins, 7, dtype)
    with one_thread():
        assert pack(cpu, left, margins, 7, dtype) == packed
    assert unpack(cpu, packed, margins, 7, dtype, left).tobytes() == left.tobytes()


@each_dtype
@each_backend
def test_no_element_changes_by_more_than_its_margin_or_by_more_than_most_bits(dtype, kernels):
    form = FORMATS[in_dtype(np.zeros(1, np.float32), dtype).dtype]
    most = 3 * form.step + 1
    for x in samples(dtype, 2000):
        for margins in margin_samples(2000):
            left = rounded(kernels, x, margins, most)
            finite = np.isfinite(as_float32(x))
            assert as_bits(left)[~finite].tobytes() == as_bits(x)[~finite].tobytes()
            was, now = (as_float32(each)[finite].astype(np.float64) for each in (x, left))
            assert np.isfinite(now).all()
            off = np.abs(now - was)
            with np.errstate(all="ignore"):
                allowed = np.where(margins > 0, 2.0 ** (margins - 127.0 - form.mantissa), 0)[finite]
                least = np.maximum(np.abs(was), 2.0**form.least_exponent)
            assert (off <= allowed).all()
            assert (off <= least * 2.0 ** (most - 1 - form.mantissa)).all()


def test_ties_go_to_even_and_an_overflow_is_truncated():
    x = np.array([1.5, 2.5, 3.5, -2.5, 1.25, np.finfo(np.float32).max, -0.0, 1e-45, np.inf], np.float32)
    margins = np.array([127 + 22, 127 + 22, 127 + 22, 127 + 22, 0, 254, 200, 200, 255], np.uint8)
    for kernels in BACKENDS:
        left = rounded(kernels, x, margins, 23)
        assert left[:5].tolist() == [2.0, 2.0, 4.0, -2.0, 1.25]
        assert left[5] < np.inf
        assert as_bits(left)[6:8].tolist() == [0, 0]
        assert left[8] == np.inf


@each_backend
def test_margins_are_the_exponents_of_limits_over_the_guard(kernels):
    limits = np.array([4.0, 4.1, 3.9, 0.0, -1.0, np.nan, np.inf, 1e-44, 2.0**-126], np.float32)
    out = np.empty(limits.size, np.uint8)
    kernels.margins_of(limits, 4.0, out)
    assert out.tolist() == [127, 127, 126, 0, 0, 0, 252, 0, 0]
    kernels.margins_of(limits, 1.0, out)
    assert out.tolist() == [129, 129, 128, 0, 0, 0, 254, 0, 1]
    kernels.margins_of(limits, 0.5, out)
    assert out.tolist() == [130, 130, 129, 0, 0, 0, 255, 0, 2]


@each_dtype
@given(data=st.data())
def test_damaged_bytes_are_refused_by_all_backends_or_are_another_encoding(dtype, data):
    """What one backend accepts, all accept with the same bits, and it packs to the same bytes."""
    size = data.draw(st.sampled_from([1, 40, 300]))
    index = data.draw(st.integers(0, 6))
    x = list(samples(dtype, size))[index]
    margins = margin_samples(size)[data.draw(st.integers(0, 3))]
    packed = pack(cpu, rounded(cpu, x, margins, 7), margins, 7, dtype)
    if packed is None:
        return
    changed = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = changed[: data.draw(st.sampled_from([len(changed), len(changed) - 1]))]
    found = [unpack(kernels, bytes(changed), margins, 7, dtype, x) for kernels in BACKENDS]
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        assert found[0].tobytes() == found[1].tobytes()
        assert pack(cpu, found[0], margins, 7, dtype) == bytes(changed)


def test_wrong_lengths_are_refused():
    x, margins, out = np.ones(4, np.float32), np.zeros(3, np.uint8), np.empty(16, np.uint8)
    code = CODES["float32"]
    for kernels in BACKENDS:
        with pytest.raises(ValueError, match="margins of 4"):
            kernels.round_floats(x, margins, 7, x)
        with pytest.raises(ValueError, match="margins of 4"):
            kernels.pack_rounded(x, margins, 7, code, out)
        with pytest.raises(ValueError, match="margins of 4"):
            kernels.unpack_rounded(out, margins, 7, code, x)
        with pytest.raises(ValueError, match="at least 16"):
            kernels.pack_rounded(x, np.zeros(4, np.uint8), 7, code, out[:15])
        with pytest.raises(ValueError, match="out of 4"):
            kernels.margins_of(x, 1.0, margins)


def test_a_code_of_another_tensor_still_packs():
    x = torch.randn(3000).numpy() * np.float32(1e-20)
    margins = np.full(3000, 50, np.uint8)
    left = rounded(cpu, x, margins, 19)
    assert unpack(cpu, pack(cpu, left, margins, 19, "float32"), margins, 19, "float32", x).tobytes() == left.tobytes()
