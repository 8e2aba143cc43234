"""A vision model with sparsifiers in the lab: DRAGONN's figures 3 and 4 and table 2 on a small scale.

The folder is that of `benchmarks.data.cifar.load`. Four ranks train its ResNet. With 64 channels in the first stage it
has 1.2 million parameters, which take longer on a link of 100 Mb/s than the computation of a batch of 16 images.

Source: DRAGONN (Wang et al. 2022), section 5.1, ResNet50 on ImageNet. Differences: 8 layers, small images, some hundred
steps; SGD with momentum, with momentum correction for all sparsifiers; their ratio falls to 0.001 over the first
quarter of the steps.
"""
# Shapes: B = images of a batch

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from benchmarks.data.cifar import ResNet, batch, load
from benchmarks.papers.dragonn import learning
from benchmarks.papers.dragonn.learning import Design, Study
from gradwire.bench.workload import Samples, Workload, batch_generator

BLOCKS, WIDTH = 1, 64
LEARNING_RATE, MOMENTUM = 0.05, 0.9
HELD_OUT = 2000  # of the 10,000 test images: validating costs as much as training here


class Cifar10(Workload):
    """Images of ten classes.

    Args:
        data: Folder or tar file of the images.
    """

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "ResNet of 8 layers on CIFAR-10, 1.2 million parameters"
    batch_size: ClassVar[int] = 16

    def __init__(self, data: Path) -> None:
        self._train, self._test = load(data, "train"), load(data, "test")

    def model(self) -> nn.Module:
        """1.2 million parameters."""
        return ResNet(BLOCKS, WIDTH)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def schedule(self, step: int, steps: int) -> float:
        """Linear warm-up over 20 steps, and linear decay over the second half."""
        return min(1.0, (step + 1) / 20, max(0.02, 2 * (steps - step) / max(1, steps)))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """Images drawn, cropped and flipped at random."""
        generator = batch_generator(seed, step, rank, world_size)
        index = torch.randint(len(self._train[1]), (self.batch_size,), generator=generator)
        return Samples(*batch(self._train, index, generator=generator))

    def validation(self) -> Samples:
        """Every fifth test image, because test images are sorted by class."""
        return Samples(*batch(self._test, torch.arange(0, len(self._test[1]), len(self._test[1]) // HELD_OUT)))


STUDY = Study(
    name="vision",
    workload="benchmarks.papers.dragonn.vision.Cifar10",
    measure="accuracy",
    designs=(
        Design("dense", "ddp-fp32"),
        Design("dragonn", "dragonn:ratio=0.001{warmup}/momentum"),
        Design("dgc", "dgc:ratio=0.001{warmup}/momentum"),
        Design("topk", "topk:ratio=0.001{warmup}/momentum"),
    ),
    steps=240,
    validate_every=40,
)


run, table, plot, KEY, CHOICES = STUDY.run, STUDY.table, STUDY.plot, learning.KEY, learning.CHOICES
