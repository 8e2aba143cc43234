"""One call of `Synchronizer.submit`: what is given to it, its future, and what that still waits for."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.core.errors import SyncError
from gradwire.sync.staging import Staging


@dataclass(frozen=True)
class GradientSlice:
    """A range of one parameter's gradient, to be averaged in place.

    Attributes:
        name: parameter name.
        tensor: the values; overwritten with the mean over ranks. Any strides, any device.
        offset: global element index of the first value, where the tensor is a range of the parameter.
        used: whether this rank's backward used the parameter; where not, the values are zeros and this rank's
            residual stays where it is.
    """

    name: str
    tensor: torch.Tensor
    offset: int = 0
    used: bool = True


class Submission:
    """Completes its future when everything it expects has arrived, and the call itself has ended; or when that fails.

    Args:
        staging: its tensors.
        value: what the future shall hold.
    """

    def __init__(self, staging: Staging, value: Any) -> None:
        self.staging = staging
        self.future = staging.future()
        self._value = value
        self._left = 1  # the call itself
        self._completed = False
        self._lock = threading.Lock()

    def expect(self) -> None:
        """Wait for one thing more."""
        with self._lock:
            self._left += 1

    def arrived(self, elsewhere: Staging | None = None) -> None:
        """One thing has arrived; on the engine's thread, or on the caller's.

        Args:
            elsewhere: where it was staged, if not with the rest.
        """
        if elsewhere is not None:
            self.staging.follow(elsewhere)
        with self._lock:
            self._left -= 1
            if self._left or self._completed:
                return
            self._completed = True
        self.staging.finish(self.future, self._value)

    def failed(self, error: SyncError) -> None:
        """Something will not arrive; on any thread. Only the first such error counts."""
        with self._lock:
            if self._completed:
                return
            self._completed = True
        self.future.set_exception(error)
