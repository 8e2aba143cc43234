"""Staging: flat CPU tensors for the engine, from gradients in any layout and on any device, and back.

A contiguous CPU tensor is used in place. Groups of small tensors, strided tensors and CUDA tensors are copied to a flat
buffer and back. CUDA copies run on a side stream through pinned memory, so that the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gradwire.core import torch_private

# Waits for copies from GPUs, one after another. The thread begins with the first copy.
_waiter = ThreadPoolExecutor(1, thread_name_prefix="gradwire-copies")


class Staging:
    """The tensors of one submission.

    Args:
        tensors: Tensors that are all on the CPU, or all on one CUDA device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._stores: list[Callable[[], None]] = []
        self._loaded: list[torch.cuda.Event] = []
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._stream: torch.cuda.Stream | None = None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def flat(self, index: int) -> torch.Tensor:
        """Return one tensor as a flat CPU tensor."""
        return self.contiguous([index])[0].view(-1)

    def contiguous(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return tensors as contiguous CPU tensors."""
        tensors = [self._tensors[index] for index in indices]
        if self._device is None and all(tensor.is_contiguous() for tensor in tensors):
            return tensors
        return [
            tensor if self._device is None and tensor.is_contiguous() else self._copied([index])
            for index, tensor in zip(indices, tensors, strict=True)
        ]

    def joined(self, indices: Sequence[int]) -> torch.Tensor:
        """Return several tensors as one flat CPU tensor: the same memory if they are neighbors there."""
        if len(indices) == 1:
            return self.flat(indices[0])
        if self._device is None:
            neighbors = _neighbors([self._tensors[index] for index in indices])
            if neighbors is not None:
                return neighbors
        return self._copied(indices)

    def _copied(self, indices: Sequence[int]) -> torch.Tensor:
        tensors = [self._tensors[index] for index in indices]
        sizes = [tensor.numel() for tensor in tensors]
        pieces: Sequence[torch.Tensor]
        if self._device is None and all(tensor.is_contiguous() for tensor in tensors):
            tensors = [tensor.view(-1) for tensor in tensors]
            flat = torch.cat(tensors)  # one call: for small tensors, calls take longer than bytes
            pieces = torch.split(flat, sizes)
        else:
            is_pinned = self._device is not None
            flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu", pin_memory=is_pinned)
            pieces = [piece.view(tensor.shape) for tensor, piece in zip(tensors, torch.split(flat, sizes))]
            with torch.cuda.stream(self._stream):  # no effect without a stream
                for tensor, piece in zip(tensors, pieces):
                    piece.copy_(tensor, non_blocking=True)
                if self._stream is not None:
                    self._loaded.append(self._stream.record_event())

        def store() -> None:
            torch_private.copy_all(pieces, tensors)

        self._stores.append(store)
        return flat

    def wait_loaded(self) -> None:
        """Block until the copies have arrived."""
        for event in self._loaded:
            event.synchronize()

    def loading(self) -> Future[None] | None:
        """Return a future that is done when all copies so far have arrived; None if there are none."""
        return _waiter.submit(self._loaded[-1].synchronize) if self._loaded else None

    def future(self) -> torch.futures.Future[Any]:
        """Return a future that synchronizes with the CUDA streams of its waiters."""
        return torch.futures.Future(devices=None if self._device is None else [self._device])

    def store(self) -> None:
        """Copy the results back."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for store in self._stores:
                store()

    def finish(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Copy the results back, then complete the future."""
        self.store()
        with torch.cuda.stream(self._stream):
            future.set_result(value)


def _neighbors(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the memory of tensors that follow each other without gaps, as one flat tensor; None if they do not."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    if tensors[-1].untyped_storage().data_ptr() != storage:
        return None
    return first.as_strided(((end - first.data_ptr()) // first.itemsize,), (1,))
