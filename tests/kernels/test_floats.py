from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compressors.support import exponent_prior
from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu import parallel
from gradwire.kernels.float_format import CHUNK, FLAT, FORM_SHIFT, FORMATS, LEVELLED, STORED, as_bits, field_bytes
from gradwire.kernels.prefix_code import NUM_SYMBOLS, PrefixCode
from tests.kernels.samples import BACKENDS

CODES = {
    "float32": exponent_prior.code(torch.float32),
    "float16": exponent_prior.code(torch.float16),
    "bfloat16": exponent_prior.code(torch.bfloat16),
}
DTYPES = list(CODES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_backend = pytest.mark.parametrize("kernels", BACKENDS)
LENGTHS = [0, 1, 7, 8, 9, 100, 511, 512, 513, 4100]


def in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def samples(dtype: str, size: int) -> Iterator[np.ndarray]:
    """Gaussian, with zeros, with short mantissas, arbitrary bits, only zeros, special values, and constants."""
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size).astype(np.float32) * np.float32(0.01)
    sparse = np.where(rng.random(size) < 0.4, np.float32(0), normal)
    short = (normal.view(np.uint32) & np.uint32(0xFFFF8000)).view(np.float32)
    mixed = np.where(rng.random(size) < 0.5, short, sparse)
    odd = sparse.copy()
    odd[::7], odd[1::5], odd[3::9], odd[4::11] = 1e-41, -0.0, np.nan, -np.inf
    for values in (normal, sparse, short, mixed, odd, np.zeros(size, np.float32), np.full(size, -3.5, np.float32)):
        yield in_dtype(values, dtype)
    bits = np.uint32 if dtype == "float32" else np.uint16
    anything = rng.integers(0, np.iinfo(bits).max, size, bits, endpoint=True)
    yield anything if dtype == "bfloat16" else anything.view(dtype)


def pack(kernels, x: np.ndarray, code: PrefixCode) -> bytes | None:
    guarded = np.full(x.nbytes + 32, 7, np.uint8)
    length, finite = kernels.pack_floats(x, code, guarded[16 : 16 + x.nbytes])
    assert finite == (kernels.count_nonfinite(x) == 0)
    assert (guarded[:16] == 7).all()
    assert (guarded[16 + x.nbytes :] == 7).all()
    assert length < x.nbytes
    assert kernels.packs_shorter(x, code) == (length >= 0)
    return guarded[16 : 16 + length].tobytes() if length >= 0 else None


def unpack(kernels, data: bytes, like: np.ndarray, code: PrefixCode) -> np.ndarray | None:
    margin = 64
    guarded = np.full(like.size + 2 * margin, 7, like.dtype)
    out = guarded[margin : margin + like.size]
    taken = kernels.unpack_floats(np.frombuffer(data, np.uint8), code, out)
    assert (guarded[:margin] == 7).all()
    assert (guarded[margin + like.size :] == 7).all()
    return out.copy() if taken else None


@each_dtype
@pytest.mark.parametrize("size", LENGTHS)
def test_all_bits_come_back_and_backends_write_the_same(dtype, size):
    for x in samples(dtype, size):
        packed = pack(cpu, x, CODES[dtype])
        assert packed == pack(reference, x, CODES[dtype])
        if packed is not None:
            for kernels in BACKENDS:
                assert unpack(kernels, packed, x, CODES[dtype]).tobytes() == x.tobytes()


@each_dtype
@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_all_bits_come_back_from_several_chunks(dtype, size):
    for x in samples(dtype, size):
        packed = pack(cpu, x, CODES[dtype])
        if packed is not None:
            assert unpack(cpu, packed, x, CODES[dtype]).tobytes() == x.tobytes()


def test_every_float16_and_bfloat16_comes_back():
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (np.float16, np.uint16):
        x = np.concatenate([every, np.zeros(1 << 20, np.uint16)]).view(dtype)
        packed = pack(cpu, x, CODES["float16" if dtype == np.float16 else "bfloat16"])
        assert unpack(cpu, packed, x, CODES["float16" if dtype == np.float16 else "bfloat16"]).tobytes() == x.tobytes()


@each_backend
def test_a_gaussian_takes_sign_mantissa_and_under_three_bits(kernels):
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * np.float32(1e-7)
    bits = 8 * len(pack(kernels, x, CODES["float32"])) / x.size
    assert 24 + 2.54 < bits < 24 + 2.95


@each_backend
def test_zeros_take_the_word_of_zero_alone(kernels):
    x = np.zeros(8000, np.float32)
    word = int(CODES["float32"].lengths[0])
    assert len(pack(kernels, x, CODES["float32"])) == 4 + 17 + 1000 * word


@each_backend
def test_a_chunk_takes_the_shorter_form(kernels):
    def form(x: np.ndarray) -> int:
        return int.from_bytes(pack(kernels, x, CODES["float32"])[:4], "little") >> FORM_SHIFT

    normal = np.random.default_rng(1).standard_normal(1600).astype(np.float32)
    cut = (normal.view(np.uint32) & np.uint32(0xFFFFFFC0)).view(np.float32)
    assert form(normal) == FLAT
    assert form(cut) == LEVELLED
    few = normal.copy()
    few[:100] = cut[:100]
    assert form(few) == FLAT


def test_a_chunk_that_does_not_shrink_is_stored_among_others():
    rng = np.random.default_rng(2)
    noise = rng.integers(0, 1 << 32, CHUNK, np.uint32).view(np.float32)
    normal = rng.standard_normal(CHUNK).astype(np.float32)
    x = np.concatenate([normal, noise, normal])
    packed = pack(cpu, x, CODES["float32"])
    forms = [int(entry) >> FORM_SHIFT for entry in np.frombuffer(packed[:12], "<u4")]
    assert forms == [FLAT, STORED, FLAT]
    assert unpack(cpu, packed, x, CODES["float32"]).tobytes() == x.tobytes()


@given(data=st.data())
def test_damaged_bytes_stay_in_bounds_and_what_is_taken_is_the_one_encoding(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(1, 300))
    code = CODES[dtype]
    which = data.draw(st.integers(0, 7))
    x = list(samples(dtype, size))[which]
    packed = bytearray(pack(cpu, x, code) or data.draw(st.binary(max_size=100)))
    for _ in range(data.draw(st.integers(0, 3))):
        if packed:
            packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        packed = packed[: data.draw(st.integers(0, len(packed)))] + data.draw(st.binary(max_size=9))
    found = unpack(cpu, bytes(packed), x, code)
    again = unpack(reference, bytes(packed), x, code)
    assert (found is None) == (again is None)
    if found is not None:
        assert found.tobytes() == again.tobytes()
        assert pack(cpu, found, code) == bytes(packed)


def _flipped(packed: bytes, bit: int) -> bytes:
    changed = bytearray(packed)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@each_dtype
@pytest.mark.parametrize("which", [0, 3, 4])
def test_every_flipped_bit_is_refused_or_another_tensor_in_its_one_encoding(dtype, which):
    x = list(samples(dtype, 60))[which]
    x = np.concatenate([x, np.zeros(300, x.dtype)])  # so that it shrinks in any case
    packed = pack(cpu, x, CODES[dtype])
    for bit in range(8 * len(packed)):
        found = unpack(cpu, _flipped(packed, bit), x, CODES[dtype])
        if found is not None:
            assert found.tobytes() != x.tobytes()
            assert pack(cpu, found, CODES[dtype]) == _flipped(packed, bit)


@each_backend
def test_another_code_or_another_size_is_refused_or_another_tensor(kernels):
    x = np.random.default_rng(3).standard_normal(500).astype(np.float32)
    packed = pack(kernels, x, CODES["float32"])
    for size in (499, 501, 1000):
        assert unpack(kernels, packed, np.empty(size, np.float32), CODES["float32"]) is None
    other = PrefixCode.of(np.ones(256, np.int64))
    found = unpack(kernels, packed, x, other)
    assert found is None or found.tobytes() != x.tobytes()


@each_dtype
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_bytes_of_one(dtype, threads, monkeypatch):
    size = 3 * 16 * CHUNK + 777
    x = np.resize(np.concatenate(list(samples(dtype, 4 * CHUNK + 99))), size)
    noise = np.random.default_rng(5).integers(0, 256, x.nbytes, np.uint8).view(x.dtype)
    partly = np.concatenate([x[: size // 2], noise[: size - size // 2]])  # some threads have only chunks to store
    for each in (x, partly, noise):
        monkeypatch.setattr("gradwire.kernels.cpu.parallel.num_threads", lambda: 1)
        expected = pack(cpu, each, CODES[dtype])
        monkeypatch.setattr("gradwire.kernels.cpu.parallel.num_threads", lambda: threads)
        packed = pack(cpu, each, CODES[dtype])
        assert packed == expected
        if packed is None:
            continue
        assert unpack(cpu, packed, each, CODES[dtype]).tobytes() == each.tobytes()
        for bit in (3, 8 * len(packed) // 2, 8 * len(packed) - 1):
            found = unpack(cpu, _flipped(packed, bit), each, CODES[dtype])
            assert found is None or found.tobytes() != each.tobytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_has_threads_of_its_own():
    assert parallel.run_all([lambda: 1, lambda: 2]) == [1, 2]
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it, should it wait for threads that it does not have
        os._exit(0 if parallel.run_all([lambda: 1, lambda: 2]) == [1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_are_no_more_than_a_ranks_share_of_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parallel.num_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert parallel.num_threads() == 3
    assert [len(part) for part in parallel.shares(100, 16)] == [33, 33, 34]
    assert parallel.shares(20, 16) == [range(20)]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert parallel.num_threads() == parallel.MOST_THREADS
    with parallel.one_thread():
        assert parallel.num_threads() == 1
    assert parallel.num_threads() == parallel.MOST_THREADS


@each_dtype
@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK + 5])
def test_symbols_are_counted(dtype, size):
    for x in samples(dtype, size):
        counts = [np.full(NUM_SYMBOLS, 3, np.int64) for _ in BACKENDS]
        for kernels, found in zip(BACKENDS, counts, strict=True):
            kernels.exponent_counts(x, found)
        assert (counts[0] == counts[1]).all()
        assert (counts[0] - 3).sum() == size
        assert counts[0][0] - 3 == (as_bits(x) == 0).sum()


@each_backend
def test_symbols_do_not_depend_on_the_magnitude_of_a_tensor(kernels):
    x = np.random.default_rng(4).standard_normal(3000).astype(np.float32)
    small, large = (x * np.float32(2.0**power) for power in (-60, 60))
    counts = [np.zeros(NUM_SYMBOLS, np.int64) for _ in range(2)]
    kernels.exponent_counts(small, counts[0])
    kernels.exponent_counts(large, counts[1])
    assert (counts[0] == counts[1]).all()
    assert abs(int(counts[0].argmax()) - FORMATS[x.dtype].center) <= 1


@pytest.mark.parametrize(("count", "width", "expected"), [(10, 24, 30), (10, 18, 23), (9, 6, 8), (3, 5, 3), (0, 11, 0)])
def test_fields_are_packed_tightly(count, width, expected):
    assert field_bytes(count, width) == expected


@each_backend
def test_wrong_buffers_are_refused(kernels):
    with pytest.raises(ValueError, match="Expected out of at least 12 bytes, got 11"):
        kernels.pack_floats(np.ones(3, np.float32), CODES["float32"], np.empty(11, np.uint8))
    with pytest.raises(TypeError, match="Expected float32, float16 or uint16"):
        kernels.pack_floats(np.ones(3), CODES["float32"], np.empty(24, np.uint8))
    with pytest.raises(ValueError, match="Expected counts of 257 elements, got 256"):
        kernels.exponent_counts(np.ones(3, np.float32), np.zeros(256, np.int64))
