"""The pool of large arrays."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from gradwire.core import buffers
from gradwire.core.buffers import KEPT_BYTES, MIN_BYTES


@pytest.fixture(autouse=True)
def empty_pool():
    gc.collect()
    buffers._free.clear()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_the_next_array_of_about_the_size_gets_the_memory():
    first = buffers.empty(MIN_BYTES, np.float32)
    where = address(first)
    assert first.shape == (MIN_BYTES,) and first.dtype == np.float32
    del first
    assert buffers.free_bytes() == 4 * MIN_BYTES
    second = buffers.empty(4 * MIN_BYTES - 100)
    assert address(second) == where and second.nbytes == 4 * MIN_BYTES - 100
    assert buffers.free_bytes() == 0


def test_much_smaller_and_larger_arrays_get_memory_of_their_own():
    first = buffers.empty(8 * MIN_BYTES)
    where = address(first)
    del first
    others = buffers.empty(2 * MIN_BYTES), buffers.empty(16 * MIN_BYTES)
    assert where not in map(address, others)


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[5:10],
        lambda array: array.view(np.uint16)[::2].reshape(-1, 2),
        lambda array: array.data[7:],
        lambda array: torch.from_numpy(array)[3:],
        lambda array: memoryview(array.view(np.float32)).cast("B"),
    ],
    ids=["slice", "view", "memoryview", "tensor", "cast"],
)
def test_memory_is_not_reused_while_anything_refers_to_it(keep):
    array = buffers.empty(MIN_BYTES)
    where = address(array)
    kept = keep(array)
    del array
    gc.collect()
    assert buffers.free_bytes() == 0
    assert address(buffers.empty(MIN_BYTES)) != where
    del kept
    assert where in [address(buffers.empty(MIN_BYTES))]


def test_unused_memory_is_bounded():
    arrays = [buffers.empty(KEPT_BYTES // 4) for _ in range(8)]
    assert buffers.free_bytes() == 0
    del arrays
    assert 0 < buffers.free_bytes() <= KEPT_BYTES


def test_the_block_used_last_is_kept_whatever_its_size():
    small, large = buffers.empty(MIN_BYTES), buffers.empty(KEPT_BYTES + MIN_BYTES)
    where = address(large)
    del small
    del large
    assert buffers.free_bytes() == KEPT_BYTES + MIN_BYTES
    assert address(buffers.empty(KEPT_BYTES + MIN_BYTES)) == where


def test_threads_that_pass_arrays_on_never_share_memory():
    errors = []
    slots: list[np.ndarray | None] = [None] * 8

    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        for _ in range(300):
            array = buffers.empty(int(draw.integers(MIN_BYTES, 2 * MIN_BYTES)))
            array.fill(number)
            slots[int(draw.integers(8))] = array  # the last view of another one goes here, on this thread
            if (array != number).any():
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(slot is None or (slot == slot[0]).all() for slot in slots)


def test_a_size_that_the_system_does_not_have_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes of memory"):
        buffers.empty(1 << 60)


def test_small_arrays_are_not_of_the_pool():
    small = buffers.empty(MIN_BYTES // 4 - 1, np.float32)
    del small
    assert buffers.free_bytes() == 0
