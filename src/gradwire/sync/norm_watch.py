"""The norm watch: finds a rank whose gradient of a tensor is suddenly much longer or shorter than those of the others.

In every N-th step, each rank takes the 2-norm of each of its gradients, before they are averaged. When the next
step begins, ranks exchange these norms, and each rank judges all of them. A norm is compared with those of the other
ranks in the same step, so a change that all ranks see, such as another learning rate or loss scale, is no jump. What
counts is how far a rank is from the others now, compared with how far it usually is, so ranks may have different data.

It reports, and changes nothing. Gradients that are not finite are not its concern: their steps are rolled back.

Guarantees: All ranks find the same jumps, because they judge the same numbers. No numbers are exchanged in other steps.

Does not see: faults between two watched steps; faults that hardly change the norm of a tensor, such as a changed sign,
a flipped bit of the mantissa, or a large element that becomes zero; a gradient that is zero everywhere, because a rank
may not have used the parameter; and a rank that is broken from the beginning on, because that is how it usually is.
"""

# Shapes: W = ranks, T = tensors

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from gradwire.core.events import Event, EventStream
from gradwire.sync.job import group_name
from gradwire.sync.submission import GradientSlice

logger = logging.getLogger("gradwire")

MIN_SAMPLES = 16
"""Watched steps of a tensor before its norms are judged."""
MIN_SCORE = 10.0
"""Smallest deviation of a jump, in standard deviations."""
MIN_RATIO = 4.0
"""Smallest factor of a jump."""
MEMORY = 32  # watched steps over which means and deviations are taken
_OUTLIER = 5.0  # deviations beyond this many standard deviations count as this many
_TO_SIGMA = 1.4826  # standard deviation of a normal distribution, from the median of its deviations
_LEAST_SIGMA = 1e-3
_LARGEST = math.sqrt(float(np.finfo(np.float32).max))  # a norm of float32 elements that overflows is larger


class NormJump(NamedTuple):
    """A norm that does not fit.

    Attributes:
        rank: Rank whose gradient it is.
        tensor: Index of the tensor.
        ratio: The norm, divided by what it usually is in comparison with those of the other ranks.
    """

    rank: int
    tensor: int
    ratio: float


class NormStatistics:
    """How far the norms of each rank usually are from those of the others, for T tensors.

    The distance is that of the logarithm of a norm, less the running mean of its distances, from the median over ranks.
    Its deviation is a running mean of the median over ranks. Running means forget within `MEMORY` steps.
    """

    def __init__(self, world_size: int, num_tensors: int) -> None:
        self._num_samples = np.zeros(num_tensors, np.int64)
        self._centers = np.zeros((world_size, num_tensors))
        self._sigmas = np.zeros(num_tensors)
        self._levels = np.zeros((world_size, num_tensors))  # running means of the logarithms themselves

    def judge(self, norms: np.ndarray) -> list[NormJump]:
        """Return what does not fit.

        Args:
            norms: float64[W, T]. Tensors with a norm of 0, infinity or NaN are not judged.
        """
        logs, known = _logs(norms)
        distances = self._distances(logs)
        far = np.abs(distances) > MIN_SCORE * np.maximum(self._sigmas, _LEAST_SIGMA)
        if len(norms) == 2:
            distances *= 2  # the median is in the middle
            changes = np.abs(logs - self._levels)
            far &= changes >= changes[::-1]  # the one that has changed more
        far &= np.abs(distances) > math.log(MIN_RATIO)
        far &= known & (self._num_samples >= MIN_SAMPLES)
        return [
            NormJump(int(rank), int(tensor), float(np.exp(distances[rank, tensor])))
            for rank, tensor in np.argwhere(far)
        ]

    def learn(self, norms: np.ndarray) -> None:
        """Add the norms of a step to the statistics."""
        logs, known = _logs(norms)
        distances = self._distances(logs)
        sample = _TO_SIGMA * np.median(np.abs(distances), axis=0)
        begun = self._num_samples > 0
        most = _OUTLIER * np.maximum(self._sigmas, _LEAST_SIGMA)
        sample[begun] = np.minimum(sample, most)[begun]
        distances[:, begun] = np.clip(distances, -most, most)[:, begun]
        weight = known / np.minimum(self._num_samples + 1, MEMORY)
        self._sigmas += weight * (sample - self._sigmas)
        self._centers += weight * distances
        self._levels += weight * (logs - self._levels)
        self._num_samples += known

    def _distances(self, logs: np.ndarray) -> np.ndarray:
        # Centered first: one rank then cannot move the median by more than the ranks usually differ.
        centered = logs - self._centers
        return np.asarray(centered - np.median(centered, axis=0))


def _logs(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of norms, and which tensors all ranks have a positive, finite norm of."""
    known = np.asarray(((norms > 0) & (norms < math.inf)).all(0))
    return np.log(np.where(known, norms, 1.0)), known


@dataclass
class _Record:
    """What was found of one rank.

    Attributes:
        names: Tensors whose norms have jumped.
        count: Number of jumps.
        latest: The largest jump of the latest step with any.
    """

    names: set[str] = field(default_factory=set)
    count: int = 0
    latest: str = ""


class NormWatch:
    """Takes the norms of this rank's gradients, and reports jumps among the norms of all ranks.

    A jump is an event of kind ``norm_jump`` on every rank. Rank 0 logs a warning, once per rank and tensor.

    Args:
        every: Interval of watched steps.
        rank: This rank.
        events: Event stream.
    """

    def __init__(self, every: int, rank: int, events: EventStream) -> None:
        self._every = every
        self._rank = rank
        self._events = events
        self._step = 0  # of the norms in `_taken`
        self._taken: list[tuple[str, torch.Tensor]] = []
        self._statistics: dict[tuple[int, int], NormStatistics] = {}  # by first tensor and number of tensors
        self._records: dict[int, _Record] = {}  # by rank
        self._lock = threading.Lock()

    def watches(self, step: int) -> bool:
        """Whether norms are taken in a step. The same on all ranks."""
        return step > 0 and step % self._every == 0

    def take(self, step: int, slices: Sequence[GradientSlice]) -> None:
        """Take the norms of gradients that are about to be averaged. Does not wait for a GPU."""
        if step != self._step:
            self._step, self._taken = step, []
        self._taken += [(each.name, _norm(each.tensor.detach())) for each in slices]

    def discard(self) -> None:
        """Forget the norms of this step, which is rolled back."""
        self._taken.clear()

    def norms(self, step: int, ids: Mapping[str, int]) -> np.ndarray:
        """Return the norms that were taken in a step.

        Args:
            step: The step.
            ids: Index of each tensor.

        Returns:
            float64[T]; 0 for tensors without a gradient.
        """
        squares = np.zeros(len(ids))
        if self._taken and step == self._step:
            found = torch.stack([norm.double() for _, norm in self._taken]).cpu().numpy()
            found = np.minimum(found, _LARGEST)  # keeps NaN
            np.add.at(squares, [ids[name] for name, _ in self._taken], found**2)
        return np.sqrt(squares)

    def compare(self, step: int, start: int, names: Sequence[str], norms: np.ndarray) -> None:
        """Judge the norms of all ranks, and learn from them.

        Args:
            step: Step of the norms.
            start: Index of the first tensor.
            names: Names of the tensors.
            norms: float64[W, T].
        """
        with self._lock:
            statistics = self._statistics.setdefault((start, len(names)), NormStatistics(*norms.shape))
            jumps = statistics.judge(norms)
            statistics.learn(norms)
            for rank in sorted({jump.rank for jump in jumps}):
                self._report(step, rank, [(names[jump.tensor], jump.ratio) for jump in jumps if jump.rank == rank])

    def _report(self, step: int, rank: int, found: list[tuple[str, float]]) -> None:
        found.sort(key=lambda each: abs(math.log(each[1])), reverse=True)
        for name, ratio in found:
            detail = {"step": step, "ratio": ratio}
            self._events.emit(Event("norm_jump", time.monotonic(), tensor=name, peer=rank, detail=detail))
        record = self._records.setdefault(rank, _Record())
        new = [name for name, _ in found if name not in record.names]
        record.names.update(new)
        record.count += len(found)
        record.latest = f"in step {step}, {found[0][0]!r} had {found[0][1]:.3g} times its usual norm"
        if new and self._rank == 0:
            logger.warning(
                "The gradients of rank %d do not look like those of the other ranks: %s. New in this step: %s. They "
                "were averaged as they are. Check the memory, the data and the code of that rank.",
                *(rank, record.latest, group_name(new)),
            )

    def notes(self) -> list[str]:
        """Return a sentence for each rank whose norms have jumped."""
        with self._lock:
            return [
                f"The norms of {len(record.names)} tensors of rank {rank} jumped {record.count} times; the last time, "
                f"{record.latest}. Check the memory, the data and the code of that rank."
                for rank, record in sorted(self._records.items())
            ]


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm, at least in float32, on the gradient's device."""
    wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=wide)
    return norm
