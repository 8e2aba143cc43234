"""Staging: gradients as flat CPU tensors for the engine, wherever they live, and back.

A contiguous CPU tensor is used where it stands. Batches of small tensors, strided tensors and CUDA tensors are copied
to a flat buffer and back; for CUDA the copies run on a side stream through pinned memory, so that backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Staging:
    """The tensors of one submission.

    Args:
        tensors: all on the CPU, or all on one CUDA device.
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

    def whole(self, index: int) -> torch.Tensor:
        """One tensor, flat, on the CPU."""
        tensor = self._tensors[index]
        if not tensor.is_cuda and tensor.is_contiguous():
            return tensor.view(-1)
        return self.batch([index])

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """Several tensors behind each other in one flat CPU tensor."""
        tensors = [self._tensors[index] for index in indices]
        if self._device is None and all(tensor.is_contiguous() for tensor in tensors):
            return self._together([tensor.view(-1) for tensor in tensors])
        count = sum(tensor.numel() for tensor in tensors)
        flat = torch.empty(count, dtype=tensors[0].dtype, pin_memory=self._device is not None)
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        with torch.cuda.stream(self._stream):  # no effect where there is no stream
            for tensor, piece in zip(tensors, pieces):
                piece.view(tensor.shape).copy_(tensor, non_blocking=True)
            if self._stream is not None:
                self._loaded.append(self._stream.record_event())

        def store() -> None:
            for tensor, piece in zip(tensors, pieces):
                tensor.copy_(piece.view(tensor.shape), non_blocking=True)

        self._stores.append(store)
        return flat

    def _together(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Flat CPU tensors behind each other, in one call: of small ones the calls take longer than the bytes."""
        flat = torch.cat(tensors)
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])

        def store() -> None:
            for tensor, piece in zip(tensors, pieces):
                tensor.copy_(piece)

        self._stores.append(store)
        return flat

    def wait_loaded(self) -> None:
        """Block until the copies have arrived. Called on the engine's thread, so that backward goes on."""
        for event in self._loaded:
            event.synchronize()

    def future(self) -> torch.futures.Future[Any]:
        """A future that CUDA streams of whoever waits for it synchronize with."""
        return torch.futures.Future(devices=None if self._device is None else [self._device])

    def store(self) -> None:
        """Copy back what was copied."""
        with torch.cuda.stream(self._stream):
            for store in self._stores:
                store()

    def follow(self, other: Staging) -> None:
        """Have the future wait for what `other` has stored, too."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def finish(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Copy back what was copied, then complete the future."""
        self.store()
        with torch.cuda.stream(self._stream):
            future.set_result(value)
