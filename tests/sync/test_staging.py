"""Staging: contiguous CPU tensors are used in place, others are copied to a flat buffer and back."""

from __future__ import annotations

import pytest
import torch

from gradwire.sync.staging import Staging

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def test_a_contiguous_tensor_is_used_in_place() -> None:
    tensor = torch.zeros(3, 4)
    staging = Staging([tensor])
    flat = staging.flat(0)
    assert flat.shape == (12,)
    flat[5] = 7
    assert tensor[1, 1] == 7, "before finish"
    tensor[0, 0] = 9
    staging.finish(staging.future(), None)
    assert tensor[0, 0] == 9, "finish does not overwrite it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "strided",
    [
        lambda base: base.T,
        lambda base: base[:, ::2],
        lambda base: base[1],
        lambda base: base[:, 1],
        lambda base: base.permute(1, 0)[2:],
    ],
)
def test_a_strided_tensor_is_copied_and_copied_back(strided: object, dtype: torch.dtype) -> None:
    base = torch.arange(30.0).view(5, 6).to(dtype)
    untouched = base.clone()
    tensor = strided(base)  # type: ignore[operator]
    staging = Staging([tensor])
    flat = staging.flat(0)
    assert flat.is_contiguous() and flat.dtype == dtype
    assert torch.equal(flat, tensor.reshape(-1))
    flat += 50
    staging.finish(staging.future(), None)
    assert torch.equal(tensor, strided(untouched) + 50)  # type: ignore[operator]
    around = base - strided_mask(strided, base, 50)
    assert torch.equal(around, untouched), "elements between the strides are not touched"


def strided_mask(strided: object, base: torch.Tensor, value: float) -> torch.Tensor:
    mask = torch.zeros_like(base)
    strided(mask).fill_(value)  # type: ignore[operator]
    return mask


def test_neighbors_in_memory_are_joined_in_place() -> None:
    memory = torch.arange(20.0)
    tensors = [memory[2:8].view(2, 3), memory[8:9], memory[9:12], memory[13:15], torch.zeros(3)]
    staging = Staging(tensors)
    flat = staging.joined([0, 1, 2])
    assert flat.data_ptr() == tensors[0].data_ptr() and flat.tolist() == list(range(2, 12))
    for apart in ([0, 2], [2, 3], [1, 0], [0, 4]):
        assert staging.joined(apart).data_ptr() != tensors[apart[0]].data_ptr()


def test_several_tensors_are_concatenated_and_copied_back() -> None:
    tensors = [torch.full((2, 3), 1.0), torch.tensor(2.0), torch.empty(0), torch.arange(4.0)[::2], torch.zeros(9)]
    staging = Staging(tensors)
    flat = staging.joined([3, 0, 1, 2])
    assert flat.tolist() == [0, 2, 1, 1, 1, 1, 1, 1, 2]
    flat *= 10
    assert tensors[0][0, 0] == 1, "not before finish"
    staging.finish(staging.future(), None)
    assert tensors[3].tolist() == [0, 20]
    assert torch.equal(tensors[0], torch.full((2, 3), 10.0))
    assert tensors[1] == 20
    assert torch.equal(tensors[4], torch.zeros(9))


def test_the_future_ends_with_its_value_after_the_copies() -> None:
    tensor = torch.zeros(4)
    staging = Staging([tensor, tensor[::2]])
    future = staging.future()
    flat = staging.flat(1)
    flat.fill_(3)
    seen: list[list[float]] = []
    future.add_done_callback(lambda _: seen.append(tensor.tolist()))
    staging.wait_loaded()
    assert not future.done()
    value = object()
    staging.finish(future, value)
    assert future.wait() is value
    assert seen == [[3, 0, 3, 0]]


@pytest.mark.gpu
def test_cuda_tensors_travel_through_pinned_memory_and_back() -> None:
    tensors = [torch.arange(6.0, device="cuda").view(2, 3), torch.arange(8.0, device="cuda")[::2]]
    staging = Staging(tensors)
    flat, joined = staging.flat(0), staging.joined([1])
    staging.wait_loaded()
    assert flat.is_pinned() and not flat.is_cuda
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert joined.tolist() == [0, 2, 4, 6]
    flat += 1
    joined *= 2
    future = staging.future()
    staging.finish(future, tensors)
    future.wait()
    assert tensors[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tensors[1].tolist() == [0, 4, 8, 12]
