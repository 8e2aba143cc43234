"""How much memory a step takes for messages and sums, and where dense means are received."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradwire.core import buffers
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SIZE = 600_000  # so that each rank's share is received by itself


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all large buffers of this process, in bytes."""
    sizes: list[int] = []
    lock, make = threading.Lock(), buffers.empty

    def counted(size: int, dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
        array = make(size, dtype)
        with lock:
            sizes.append(array.nbytes if array.nbytes >= buffers.MIN_BYTES else 0)
        return array

    monkeypatch.setattr(buffers, "empty", counted)
    return sizes


def grad_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def average(one: Synchronizer, dtype: torch.dtype = torch.float32, unused: int | None = None) -> list[torch.Tensor]:
    found = []
    for step in range(2):
        used = one.rank != unused
        grad = grad_of(one.rank, step, dtype) if used else torch.zeros(SIZE, dtype=dtype)
        one.begin_step()
        one.submit([GradientSlice("w", grad, used=used)]).wait()
        one.commit()
        found.append(grad)
    return found


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_means_of_large_tensors(world_size: int, strategy: str, dtype: torch.dtype) -> None:
    with ranks(world_size, Plan("none", strategy=strategy)) as group:
        found = group.each(lambda one: average(one, dtype))
    for step in range(2):
        expected = sum(grad_of(rank, step, dtype).double() for rank in range(world_size)) / world_size
        for means in found:
            assert torch.equal(means[step], found[0][step])
            torch.testing.assert_close(
                means[step].double(), expected, atol=5e-3 if dtype.itemsize == 2 else 1e-6, rtol=0
            )


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
def test_a_rank_that_did_not_use_a_large_tensor_gets_the_mean(strategy: str) -> None:
    with ranks(2, Plan("none", strategy=strategy)) as group:
        found = group.each(lambda one: average(one, unused=1))
    for step in range(2):
        for means in found:
            torch.testing.assert_close(means[step], grad_of(0, step) / 2)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
def test_dense_steps_allocate_only_what_is_received_to_be_added(allocated: list[int], strategy: str) -> None:
    with ranks(2, Plan("none", strategy=strategy)) as group:
        group.each(average)
    assert sum(allocated) <= 2 * 4 * SIZE  # two steps, in each of which a rank receives one half


@pytest.mark.parametrize("method", ["int8", "onebit", "threelc", "topk", "thc"])
def test_steps_reuse_their_buffers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    map_memory = buffers.mmap.mmap
    monkeypatch.setattr(buffers.mmap, "mmap", lambda *args, **flags: made.append(args) or map_memory(*args, **flags))
    with ranks(2, Plan(method)) as group:
        for _ in range(2):
            group.each(average)
        warm = len(made)
        for _ in range(4):
            group.each(average)
    assert len(made) - warm <= 2  # ranks may meet in an order that needs one more
