"""Timing of single calls on one thread, alternating with copies of the same memory.

A rate is the number of bytes that must move (inputs read once, outputs written once) divided by the median time. It is
compared with two measurements that alternate with it: a plain copy, and a sweep with the same mix of reads and writes
as the call. (A copy also fetches the lines that it overwrites, which a kernel that only reads does not.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class KernelTiming:
    """One measured kernel.

    Attributes:
        kernel: Name and variant.
        dtype: Element type of the gradient.
        size: Bytes of the float32 gradient.
        unit: Unit of the rates.
        median: Median rate.
        p20: 20th percentile of the rate.
        p80: 80th percentile of the rate.
        fraction_of_copy: Median rate divided by that of a copy.
        fraction_of_mix: Median rate divided by that of a sweep with the same mix of reads and writes.
        rival: Torch operations that do the same, or "".
        speedup: Time of the rival divided by time of the kernel; 0 without a rival.
    """

    kernel: str
    dtype: str
    size: int
    unit: str
    median: float
    p20: float
    p80: float
    fraction_of_copy: float
    fraction_of_mix: float
    rival: str
    speedup: float


@dataclass(frozen=True)
class Case:
    """A call to time, which must move `bytes_per_element`, and optionally a rival that does the same."""

    kernel: str
    dtype: str
    bytes_per_element: float
    mix: str
    call: Callable[[], object]
    rival: str = ""
    rival_call: Callable[[], object] | None = None


def _seconds(call: Callable[[], object]) -> float:
    # Processor time of this thread, so that time of other processes does not count.
    start = time.thread_time()
    call()
    return time.thread_time() - start


class Mixes:
    """Sweeps with known memory traffic, for comparison: bytes per element and call, by name."""

    def __init__(self, x: np.ndarray) -> None:
        # Separate memory, so that kernels do not find their input in the cache and copies do not overwrite it.
        source, target = x, np.zeros(x.size, np.float32)
        read = torch.from_numpy(source)
        self.calls: dict[str, tuple[float, Callable[[], object]]] = {
            "copy": (8, lambda: np.copyto(target, source)),
            "read": (4, lambda: read.sum()),
            "write": (4, lambda: target.fill(1)),
            "update": (8, lambda: np.negative(target, out=target)),
            "add": (12, lambda: np.add(target, source, out=target)),
        }


def measure(case: Case, mixes: Mixes, x: np.ndarray, repeats: int) -> KernelTiming:
    """Time a case on the gradient x."""
    copy_bytes, copy = mixes.calls["copy"]
    mix_bytes, mix = mixes.calls[case.mix]
    for warm in (case.call, copy, mix):
        warm()
    times = np.array([[_seconds(copy), _seconds(mix), _seconds(case.call)] for _ in range(repeats)])
    rates = case.bytes_per_element * x.size / times[:, 2] / 1e9
    median = float(np.median(rates))
    # Ratios of neighboring measurements: other load on the machine affects both.
    to_copy, to_mix = (
        float(np.median(rates * times[:, column] * 1e9 / (count * x.size)))
        for column, count in ((0, copy_bytes), (1, mix_bytes))
    )
    speedup = 0.0
    if case.rival_call is not None:
        rival = [_seconds(case.rival_call) for _ in range(3)]
        speedup = float(np.median(rival) / np.median(times[:, 2]))
    return KernelTiming(
        kernel=case.kernel,
        dtype=case.dtype,
        size=4 * x.size,
        unit="GB/s",
        median=median,
        p20=float(np.percentile(rates, 20)),
        p80=float(np.percentile(rates, 80)),
        fraction_of_copy=to_copy,
        fraction_of_mix=to_mix,
        rival=case.rival,
        speedup=speedup,
    )
