"""The small workload: scikit-learn's handwritten digits and a perceptron. For tests and quick runs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from gradwire.bench.extras import need
from gradwire.bench.workload import Samples, Workload, batch_generator

WIDTH = 256
_HELD_OUT = 5  # every fifth sample is for validation


class Digits(Workload):
    """1,797 images of 8 by 8 pixels, ten classes."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "scikit-learn's digits, perceptron of 0.15 million parameters"
    batch_size: ClassVar[int] = 32

    def __init__(self) -> None:
        need("sklearn", extra="test", purpose="the digits workload")
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32) / 16
        targets = torch.tensor(labels, dtype=torch.int64)
        held_out = torch.arange(len(targets)) % _HELD_OUT == 0
        self._train = Samples(inputs[~held_out], targets[~held_out])
        self._validation = Samples(inputs[held_out], targets[held_out])

    def model(self) -> nn.Module:
        """Three linear layers with a LayerNorm."""
        return nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.ReLU(),
            nn.Linear(2 * WIDTH, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """See `Workload`."""
        generator = batch_generator(seed, step, rank, world_size)
        index = torch.randint(len(self._train.targets), (self.batch_size,), generator=generator)
        return Samples(self._train.inputs[index], self._train.targets[index])

    def validation(self) -> Samples:
        """Every fifth image."""
        return self._validation
