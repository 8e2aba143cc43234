"""CIFAR-10 for simulated workers: part of its images, and a net so small that one core trains it in seconds.

Three convolutions, each with a stride of 2, and a linear layer; no normalisation, whose statistics would be a state of
each worker's own beside its parameters. Images are not augmented.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.data import cifar
from benchmarks.papers.thc.simulated_training import Replica, Task

_CHECKED = 4000  # training images of which the accuracy is taken


class Net(nn.Sequential):
    """66 thousand parameters."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


class CIFAR10(Task):
    """Images by SGD with momentum.

    Args:
        data: see `benchmarks.data.cifar.load`.
        num_epochs: passes over the training data.
        num_samples: training images, drawn once for all trainings.
    """

    name = "cifar10"
    batch_size = 8

    def __init__(self, data: Path, num_epochs: int, num_samples: int) -> None:
        self.num_epochs, self.num_samples = num_epochs, num_samples
        images, labels = cifar.load(data, "train")
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:num_samples]
        self.splits = {"train": (images[chosen], labels[chosen]), "test": cifar.load(data, "test")}

    def replica(self) -> Replica:
        """See `Task`."""
        model = Net()
        return Replica(model, torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4))

    def rate(self, progress: float, num_workers: int) -> float:
        """Rises over a tenth of the steps, then falls to zero."""
        return 0.05 * min(10 * progress, (1 - progress) / 0.9)

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Task`."""
        return cifar.batch(self.splits["train"], index)

    def right(self, model: nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        """See `Task`."""
        of = min(_CHECKED, self.num_samples) if split == "train" else len(self.splits[split][1])
        right = total = 0
        for index in torch.arange(of)[part::num_parts].split(500):
            images, labels = cifar.batch(self.splits[split], index)
            right, total = right + int((model(images).argmax(1) == labels).sum()), total + len(labels)
        return right, total
