from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import cpu, reference
from gradwire.kernels.fixed_format import CHUNK, unescaped_bytes
from gradwire.kernels.float_format import format_of
from tests.kernels.samples import BACKENDS
from tests.kernels.test_floats import LENGTHS, each_backend, each_dtype, in_dtype, samples


def pack(kernels, x: np.ndarray) -> bytes | None:
    guarded = np.full(x.nbytes + 32, 7, np.uint8)
    length, finite = kernels.pack_fixed(x, guarded[16 : 16 + x.nbytes])
    assert finite == (kernels.count_nonfinite(x) == 0)
    assert (guarded[:16] == 7).all()
    assert (guarded[16 + x.nbytes :] == 7).all()
    assert length < x.nbytes
    assert kernels.packs_shorter_fixed(x) == (length >= 0)
    return guarded[16 : 16 + length].tobytes() if length >= 0 else None


def unpack(kernels, data: bytes, like: np.ndarray) -> np.ndarray | None:
    margin = 64
    guarded = np.full(like.size + 2 * margin, 7, like.dtype)
    out = guarded[margin : margin + like.size]
    taken = kernels.unpack_fixed(np.frombuffer(data, np.uint8), out)
    assert (guarded[:margin] == 7).all()
    assert (guarded[margin + like.size :] == 7).all()
    return out.copy() if taken else None


@each_dtype
@pytest.mark.parametrize("size", [*LENGTHS, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_all_bits_come_back_and_backends_write_the_same(dtype, size):
    for x in samples(dtype, size):
        packed = pack(cpu, x)
        assert packed == pack(reference, x)
        if packed is not None:
            for kernels in BACKENDS:
                assert unpack(kernels, packed, x).tobytes() == x.tobytes()


def test_every_float16_and_bfloat16_comes_back():
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (np.float16, np.uint16):
        x = np.concatenate([every, np.full(1 << 20, 0x3C00, np.uint16)]).view(dtype)
        assert unpack(cpu, pack(cpu, x), x).tobytes() == x.tobytes()


@each_backend
@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.8755), ("bfloat16", 0.7515)])
def test_a_gaussian_of_any_scale_takes_four_bits_an_exponent_and_few_escapes(kernels, dtype, most):
    normal = np.random.default_rng(0).standard_normal(CHUNK).astype(np.float32)
    for scale in (1e-30, 1.0, 1e30):
        x = in_dtype(normal * np.float32(scale), dtype)
        assert len(pack(kernels, x)) < most * x.nbytes + 8


@each_backend
def test_zeros_have_a_code(kernels):
    x = np.zeros(8000, np.float32)
    assert len(pack(kernels, x)) == 4 + unescaped_bytes(8000, format_of("test", x))


@each_backend
def test_an_escaped_exponent_takes_a_byte(kernels):
    x = np.ones(1000, np.float32)
    before = len(pack(kernels, x))
    x[::100] = np.inf
    x[50::200] = 1e-20
    assert len(pack(kernels, x)) == before + 15


def test_a_chunk_that_does_not_shrink_is_stored_among_others():
    rng = np.random.default_rng(2)
    noise = rng.integers(0, 1 << 32, CHUNK, np.uint32).view(np.float32)
    normal = rng.standard_normal(CHUNK).astype(np.float32)
    x = np.concatenate([normal, noise, normal])
    packed = pack(cpu, x)
    sizes = np.frombuffer(packed[:12], "<u4")
    assert sizes[1] == noise.nbytes > sizes[0]
    assert unpack(cpu, packed, x).tobytes() == x.tobytes()


@each_dtype
@given(data=st.data())
def test_backends_take_the_same_bytes_and_only_those_that_they_write(dtype, data):
    size = data.draw(st.integers(1, 300))
    x = data.draw(st.sampled_from(list(samples(dtype, size))))
    packed = pack(cpu, x)
    if packed is None:
        return
    changed = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] ^= data.draw(st.integers(1, 255))
    changed = changed[: data.draw(st.sampled_from([len(changed), len(changed) - 1]))]
    found = [unpack(kernels, bytes(changed), x) for kernels in BACKENDS]
    assert len({None if each is None else each.tobytes() for each in found}) == 1
    if found[0] is not None:
        assert pack(cpu, found[0]) == bytes(changed)


@each_backend
def test_buffers_of_other_lengths_are_refused(kernels):
    x = np.ones(100, np.float32)
    with pytest.raises(ValueError, match="at least 400 bytes, got 399"):
        kernels.pack_fixed(x, np.empty(399, np.uint8))
    packed = pack(kernels, x)
    assert unpack(kernels, packed, x[:99]) is None
    assert unpack(kernels, packed + b"\0", x) is None
    assert unpack(kernels, b"", x) is None


def test_threads_write_the_same_bytes(monkeypatch):
    x = np.random.default_rng(3).standard_normal(40 * CHUNK + 5).astype(np.float32)
    alone = {}
    for threads in (1, 2):
        monkeypatch.setattr("gradwire.kernels.cpu.parallel.num_threads", lambda threads=threads: threads)
        alone[threads] = pack(cpu, x)
        assert unpack(cpu, alone[threads], x).tobytes() == x.tobytes()
    assert alone[1] == alone[2]


def test_a_chunk_without_a_byte_is_refused_before_it_is_read():
    """The body ends where no page can be read."""
    code = """
import ctypes, mmap
import numpy as np
from gradwire.kernels.cpu import unpack_fixed
pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
memory = np.frombuffer(pages, np.uint8)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
print(unpack_fixed(memory[mmap.PAGESIZE - 4 : mmap.PAGESIZE], np.empty(1000, np.float32)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
