"""Positions in few bits: each list has one encoding, chosen by size, and no other is accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import cpu, reference
from gradwire.kernels.gpu import positions as gpu
from gradwire.kernels.reference.positions import BITMAP, low_bits
from tests.kernels.samples import BACKENDS

each_backend = pytest.mark.parametrize("kernels", BACKENDS)


def packed(kernels, index, size) -> np.ndarray:
    out = np.full(kernels.positions_bytes(size, index.size), 0xAA, np.uint8)
    kernels.pack_positions(index, size, out)
    return out


def unpacked(kernels, body, size, count, dtype=np.uint32) -> np.ndarray | None:
    index = np.empty(count, dtype)
    return index if kernels.unpack_positions(body, size, index) else None


def chosen(size: int, count: int, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(size, count, replace=False)).astype(np.uint32)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000, 1025, 50_000])
def test_backends_write_the_same_bytes_and_read_them_back(size: int) -> None:
    for count in sorted({0, 1, min(2, size), size // 1000, size // 100, size // 7, size // 2, size - 1, size}):
        first = np.arange(count, dtype=np.uint32)
        for index in (chosen(size, count), first, first + np.uint32(size - count)):
            bodies = [packed(kernels, index, size) for kernels in (reference, cpu)]
            assert bodies[0].tobytes() == bodies[1].tobytes(), count
            for kernels in (reference, cpu):
                assert np.array_equal(unpacked(kernels, bodies[0], size, count), index), count


@each_backend
def test_positions_beyond_32_bits(kernels) -> None:
    """A short list in a very large tensor has more than 32 low bits per position."""
    size = 1 << 40
    index = np.array([0, 5, (1 << 33) + 1, (1 << 39) + 12345, size - 1], np.int64)
    assert low_bits(size, index.size) > 32
    body = packed(kernels, index, size)
    assert body.tobytes() == packed(reference, index, size).tobytes()
    assert np.array_equal(unpacked(kernels, body, size, index.size, np.int64), index)


@given(data=st.data())
def test_a_list_takes_near_the_fewest_bits_that_any_code_takes(data) -> None:
    """At most 3/4 of a bit a position more than the entropy of random places, and never more than a bitmap."""
    size = data.draw(st.integers(1000, 200_000))
    count = data.draw(st.integers(10, size))
    share = count / size
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share) if share < 1 else 0.0
    found = reference.positions_bytes(size, count)
    assert found <= -(-size // 8)
    if low_bits(size, count) != BITMAP:
        assert 8 * found / count <= entropy + 0.75 + 16 / count


@given(size=st.integers(0, 3000), count=st.integers(0, 3000))
def test_backends_agree_on_sizes_which_never_fall_with_more_positions(size: int, count: int) -> None:
    count = min(size, count)
    assert cpu.positions_bytes(size, count) == reference.positions_bytes(size, count)
    if count:
        assert reference.positions_bytes(size, count - 1) <= reference.positions_bytes(size, count)


def test_few_positions_take_offsets_and_many_a_bitmap() -> None:
    assert low_bits(64_000_000, 64_000) == 9
    assert low_bits(1000, 500) == BITMAP
    assert reference.positions_bytes(64_000_000, 64_000) < 1.5 * 64_000  # under 12 bits each, where an index takes 32


@each_backend
@pytest.mark.parametrize(("size", "count"), [(43, 1), (43, 5), (43, 30), (3000, 20), (3000, 2000)])
def test_every_flipped_bit_is_refused_or_another_list(kernels, size: int, count: int) -> None:
    index = chosen(size, count)
    body = packed(kernels, index, size)
    for bit in range(8 * body.size):
        other = body.copy()
        other[bit // 8] ^= 1 << bit % 8
        found = unpacked(kernels, other, size, count)
        wanted = unpacked(reference, other, size, count)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert np.array_equal(found, wanted)
            assert not np.array_equal(found, index)
            assert (np.diff(found.astype(np.int64)) > 0).all()
            assert found[-1] < size
            assert packed(kernels, found, size).tobytes() == other.tobytes()


@pytest.mark.parametrize(("size", "count"), [(43, 1), (43, 5), (43, 30), (3000, 20), (3000, 2000)])
def test_with_torch_every_flipped_bit_is_refused_or_taken_as_by_the_reference(size: int, count: int) -> None:
    body = packed(reference, np.append(chosen(size - 1, count - 1), size - 1), size)  # so that a flip can go beyond
    for bit in range(8 * body.size):
        other = body.copy()
        other[bit // 8] ^= 1 << bit % 8
        found = gpu.unpack_positions(torch.from_numpy(other), size, count)
        wanted = unpacked(reference, other, size, count)
        assert (found is None) == (wanted is None), bit
        if found is not None:
            assert np.array_equal(found.numpy(), wanted)


@given(body=st.binary(max_size=60), size=st.integers(0, 300), count=st.integers(0, 310), right_length=st.booleans())
def test_any_bytes_are_a_list_or_refused_alike_by_all_backends(body, size, count, right_length) -> None:
    if right_length:
        body = body.ljust(reference.positions_bytes(size, count), b"\x5a")[: reference.positions_bytes(size, count)]
    received = np.frombuffer(body, np.uint8)
    found = [unpacked(kernels, received, size, count) for kernels in (reference, cpu)]
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        assert np.array_equal(*found)
        assert packed(cpu, found[1], size).tobytes() == body


@each_backend
def test_a_count_that_is_not_the_list_is_refused(kernels) -> None:
    body = packed(kernels, chosen(1000, 10), 1000)
    for count in (0, 9, 11, 1001):
        assert unpacked(kernels, body, 1000, count) is None
    with pytest.raises(ValueError, match="Expected out of"):
        kernels.pack_positions(chosen(1000, 10), 1000, np.empty(3, np.uint8))
