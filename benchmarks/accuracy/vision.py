"""The vision model: DRAGONN's here, on images of half the width and height, so that whole trainings take minutes.

A step takes a quarter of the time, with as many parameters.
"""

from __future__ import annotations

from typing import ClassVar

from torch.nn import functional

from benchmarks.papers.dragonn.vision import Cifar10
from gradwire.bench.workload import Samples


class SmallCifar10(Cifar10):
    """CIFAR-10 with 16 × 16 pixels."""

    name: ClassVar[str] = "cifar10-small"
    summary: ClassVar[str] = "ResNet of 8 layers on CIFAR-10 with 16 × 16 pixels, 1.2 million parameters"

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """See `Cifar10`."""
        return _halved(super().batch(seed, step, rank, world_size))

    def validation(self) -> Samples:
        """See `Cifar10`."""
        return _halved(super().validation())


def _halved(samples: Samples) -> Samples:
    return Samples(functional.avg_pool2d(samples.inputs, 2), samples.targets)
