"""The vector types: bounds, index width, read-only memory, and arithmetic that must not be relaxed."""

import inspect

import numpy as np
import pytest

from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.lanes import lanes_below, mask_bits, splat
from gradwire.kernels.cpu.vector import array_at, f32, load, store, store_until
from gradwire.kernels.cpu.zero_run import expand_runs


@kernel
def _copy(source, out, start):
    for i in range(start, source.size, 16):
        store(out, i, load(source, i, 16))


@kernel
def _copy_until(source, out, end):
    for i in range(0, end, 16):
        store_until(out, i, end, load(source, i, 16))


@kernel
def _load_at(address, size, index, out):
    store(out, 0, load(array_at(address, size, f32), index, 16))


@kernel
def _below(count):
    return mask_bits(lanes_below(count, 16))


@kernel
def _fused(a, b):
    return mask_bits((splat(a, 16) * splat(a, 16) + splat(b, 16)) == np.float32(0))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 40])
def test_stores_end_with_the_array_and_loads_give_zeros_past_it(length):
    source = np.arange(1, 41, dtype=np.float32)
    guarded = np.full(80, -1, np.float32)
    _copy(source, guarded[16 : 16 + length], 0)
    np.testing.assert_array_equal(guarded[16 : 16 + length], source[:length])
    assert (guarded[16 + length :] == -1).all()
    padded = np.full(48, -1, np.float32)
    _copy(source[:length], padded, 0)
    np.testing.assert_array_equal(padded[:length], source[:length])
    written = -(-length // 16) * 16
    assert not padded[length:written].any()
    assert (padded[written:] == -1).all()


@pytest.mark.parametrize("end", [0, 1, 16, 21, 40, 60])
def test_store_until_stops_at_the_end(end):
    source, out = np.arange(1, 41, dtype=np.float32), np.full(40, -1, np.float32)
    _copy_until(source, out, end)
    stop = min(end, 40)
    np.testing.assert_array_equal(out[:stop], source[:stop])
    assert (out[stop:] == -1).all()


def test_indices_are_64_bit():
    # An array that claims 2^33 elements, placed so that the one that is looked at is real memory.
    real = np.arange(16, dtype=np.float32)
    far = 2**33 - 16
    address = np.uint64(real.__array_interface__["data"][0]) - np.uint64(4 * far)
    out = np.empty(16, np.float32)
    _load_at(address, 2**33, far, out)
    np.testing.assert_array_equal(out, real)


def test_masks_of_the_first_lanes():
    assert [int(_below(count)) for count in (-5, 0, 1, 5, 16, 2**40)] == [0, 0, 1, 31, 65535, 65535]


def test_products_and_sums_are_not_fused():
    a = np.float32(1 + 2**-12)
    assert _fused(a, -(a * a)) == 0xFFFF


def test_read_only_memory_does_not_compile_again():
    received = np.frombuffer(bytes(range(8)), np.uint8)
    assert not received.flags.writeable
    out = np.empty(8, np.uint8)
    cpu.zero_run_decode(received.copy(), out)
    before = len(expand_runs.signatures)
    cpu.zero_run_decode(received, out)
    assert len(expand_runs.signatures) == before


def test_signatures_are_those_of_the_oracle():
    for name in reference.__all__:
        assert inspect.signature(getattr(cpu, name)) == inspect.signature(getattr(reference, name)), name
