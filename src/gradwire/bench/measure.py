"""Timing of one call at a time, alternating with copies of the same memory, on one thread.

A figure is the bytes that must move for the work (inputs read once, outputs written once) over the median time.
It is set against two measurements that alternate with it: a plain copy, and a sweep with the call's own mix of
reads and writes (a copy also fetches the lines that it overwrites, which no kernel that only reads does).
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
        kernel: its name, and the variant.
        dtype: element type of the gradient.
        size: bytes of the float32 gradient.
        unit: of the three rates.
        median: median rate; p20 and p80 are the percentiles of the rate.
        fraction_of_copy: median rate over that of a copy.
        fraction_of_mix: median rate over that of a sweep with the same mix of reads and writes.
        rival: the torch operations that do the same, or "".
        speedup: time of the rival over time of the kernel; 0 without a rival.
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
    """What to time: `call`, which must move `bytes_per_element`, and `rival_call`, which does the same."""

    kernel: str
    dtype: str
    bytes_per_element: float
    mix: str
    call: Callable[[], object]
    rival: str = ""
    rival_call: Callable[[], object] | None = None


def _seconds(call: Callable[[], object]) -> float:
    # Time of this thread on a core, so that it does not count when another process has the core.
    start = time.thread_time()
    call()
    return time.thread_time() - start


class Mixes:
    """Sweeps of known memory traffic to compare with, by name, with their bytes an element."""

    def __init__(self, x: np.ndarray) -> None:
        # Memory of their own: kernels must not find their input warm, nor a copy write it.
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
    """Time a case over the gradient x."""
    copy_bytes, copy = mixes.calls["copy"]
    mix_bytes, mix = mixes.calls[case.mix]
    for warm in (case.call, copy, mix):
        warm()
    times = np.array([[_seconds(copy), _seconds(mix), _seconds(case.call)] for _ in range(repeats)])
    rates = case.bytes_per_element * x.size / times[:, 2] / 1e9
    median = float(np.median(rates))
    # Ratios of neighbors in time, so that whatever else the machine does touches both.
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
