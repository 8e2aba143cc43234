"""Threads for kernels whose chunks are independent.

The threads share the cores with everything else in the process, so there are few: with several ranks on a machine, at
most a rank's share of the cores.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

MOST_THREADS = 4
_alone = threading.local()


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: kernels called on this thread use no other threads, so that their cost can be measured."""
    before = getattr(_alone, "now", False)
    _alone.now = True
    try:
        yield
    finally:
        _alone.now = before


def num_threads() -> int:
    """Number of threads that one call may use, including its own."""
    return 1 if getattr(_alone, "now", False) else max(1, min(MOST_THREADS, num_cores()))


def num_cores() -> int:
    """Return this rank's share of the usable cores; 0 if there are more ranks than cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def shares(count: int, least: int) -> list[range]:
    """Divide range(count) among the threads into nearly equal ranges of at least `least`, unless there is only one."""
    parts = max(1, min(num_threads(), count // least))
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def run_all(calls: Sequence[Callable[[], int]]) -> list[int]:
    """Run calls that release the GIL, the first on this thread; return their results in order."""
    others = [_pool().submit(call) for call in calls[1:]]
    return [calls[0](), *(other.result() for other in others)]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="gradwire-kernels")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process has none of the threads
