"""Times calls on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from gradwire.kernels.cpu.parallel import one_thread

Clock = Callable[[], float]
WARM_UPS = 3
_MIN_REPEATS = 3
_MAX_REPEATS = 101


def median_seconds(call: Callable[[], object], seconds_budget: float, clock: Clock = time.thread_time) -> float:
    """Return the median time of a call after warm-up, in about `seconds_budget`."""
    call()
    first = max(_seconds(call, clock), 1e-9)
    repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(seconds_budget / first)))
    return max(float(np.median([_seconds(call, clock) for _ in range(repeats)])), 1e-9)


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    start = clock()
    call()
    return clock() - start


@contextmanager
def single_thread() -> Iterator[None]:
    """Context manager: torch and the kernels of gradwire use only this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_thread():
            yield
    finally:
        torch.set_num_threads(before)
