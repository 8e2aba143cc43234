"""One call of `Synchronizer.submit`: its input, its future, and the jobs that it still waits for."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from gradwire.core.errors import SyncError
from gradwire.sync.staging import Staging


class GradientSlice(NamedTuple):
    """A range of one parameter's gradient, to be averaged in place.

    Attributes:
        name: Parameter name.
        tensor: Values to average; overwritten with the mean over ranks. Any strides, any device.
        offset: Global element index of the first value, if the tensor is a range of the parameter.
        used: Whether this rank's backward pass used the parameter. If not, the values are zeros, and the rank keeps
            its residual.
    """

    name: str
    tensor: torch.Tensor
    offset: int = 0
    used: bool = True


class Submission:
    """Completes its future when all expected jobs have ended and the call itself has returned, or when one fails.

    Args:
        staging: Tensors of the submission.
        value: Value of the future.
    """

    def __init__(self, staging: Staging, value: Any) -> None:
        self.staging = staging
        self.future = staging.future()
        self._value = value
        self._num_pending = 1  # the call itself
        self._completed = False
        self._lock = threading.Lock()

    def expect(self) -> None:
        """Wait for one more job."""
        with self._lock:
            self._num_pending += 1

    def arrived(self) -> None:
        """Count one job as done; on the engine's thread or the caller's."""
        with self._lock:
            self._num_pending -= 1
            if self._num_pending or self._completed:
                return
            self._completed = True
        try:
            self.staging.finish(self.future, self._value)
        except Exception as error:
            failure = SyncError(f"Averages could not be copied to where the gradients are: {error}", phase="copy back")
            failure.__cause__ = error
            self.future.set_exception(failure)
            raise failure from error

    def failed(self, error: SyncError) -> None:
        """Fail the future; on any thread. Only the first error counts."""
        with self._lock:
            if self._completed:
                return
            self._completed = True
        self.future.set_exception(error)
