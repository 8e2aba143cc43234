"""Trainings of simulated workers: each computes the gradient of its batch and applies the mean that it receives.

If all workers receive the same mean, there is one model. With packet loss, each worker has a model and an optimizer,
and `EpochSync` is the paper's remedy. `benchmarks.papers.thc.simulated_workers` forms the means.

Source: THC (Li et al. 2024), section 6 and section 8.4, "simulation environment". Differences: the paper does not say
which losses are severe enough to copy the parameters of another worker; here all are. Copies are never lost.
"""
# Shapes: N elements of the flat gradient, n workers

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.papers.thc.simulated_workers import Aggregator


class Replica:
    """A model with the state of its optimizer.

    Args:
        model: Classifier.
        optimizer: Optimizer of its trained parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.size = sum(parameter.numel() for parameter in self.parameters)

    def gradient(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Flat gradient of a batch, and its loss."""
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        grads = torch.autograd.grad(loss, self.parameters)
        return torch.cat([grad.reshape(-1) for grad in grads]), float(loss.detach())

    def apply(self, mean: torch.Tensor, rate: float) -> None:
        """Take one optimizer step with this learning rate."""
        pieces = mean.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces):
            parameter.grad = piece.view_as(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def flat(self) -> torch.Tensor:
        """All parameters."""
        return nn.utils.parameters_to_vector(self.parameters).detach()

    def copy(self, other: Replica) -> None:
        """Copy the parameters of another replica."""
        with torch.no_grad():
            for own, theirs in zip(self.parameters, other.parameters):
                own.copy_(theirs)


class EpochSync:
    """After every epoch, workers that lost packets of sums copy the parameters of the worker that lost the fewest."""

    def __call__(self, replicas: Sequence[Replica], lost: np.ndarray) -> None:
        """Copy parameters, and reset the counts."""
        best = int(lost.argmin())
        for replica, packets in zip(replicas, lost):
            if packets and replica is not replicas[best]:
                replica.copy(replicas[best])
        lost[:] = 0


class Task(ABC):
    """A task to learn.

    Attributes:
        name: Name of the task.
        num_epochs: Passes over the training data.
        num_samples: Number of training samples.
        batch_size: Batch size of one worker.
    """

    name: str
    num_epochs: int
    num_samples: int
    batch_size: int

    @abstractmethod
    def replica(self) -> Replica:
        """A model, initialized by torch's global generator, with its optimizer."""

    @property
    def size(self) -> int:
        """N."""
        return self.replica().size

    @abstractmethod
    def rate(self, progress: float, num_workers: int) -> float:
        """Learning rate after this fraction of the steps."""

    @abstractmethod
    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of training samples."""

    @abstractmethod
    def right(self, model: nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        """Numbers of correct and of all predictions for every `num_parts`-th sample of "train" or "test"."""


class Outcome(NamedTuple):
    """Result of a training.

    Attributes:
        accuracy: Mean over replicas by split. Each replica classifies a part of the samples.
        losses: Training loss of each step, averaged over workers.
        apart: Root mean square distance of replicas from their mean, relative to its norm, after the last step and
            before they synchronize.
    """

    accuracy: dict[str, float]
    losses: list[float]
    apart: float


def train(task: Task, aggregator: Aggregator, seed: int, sync: EpochSync | None = None) -> Outcome:
    """Train once. The initial model and the order of samples depend only on the seed."""
    num_workers = aggregator.num_workers
    replicas = []
    for _ in range(num_workers if aggregator.diverges else 1):
        torch.manual_seed(seed)
        replicas.append(task.replica())
    generator = torch.Generator().manual_seed(seed)
    steps_an_epoch = task.num_samples // (num_workers * task.batch_size)
    num_steps, losses, apart = task.num_epochs * steps_an_epoch, list[float](), 0.0
    for _ in range(task.num_epochs):
        order = torch.randperm(task.num_samples, generator=generator)
        for samples in order[: steps_an_epoch * num_workers * task.batch_size].split(num_workers * task.batch_size):
            batches = [task.batch(index) for index in samples.split(task.batch_size)]
            found = [replicas[rank % len(replicas)].gradient(*batch) for rank, batch in enumerate(batches)]
            means = aggregator.means([grad for grad, _ in found], len(losses))
            for replica, mean in zip(replicas, means):
                replica.apply(mean, task.rate((len(losses) + 0.5) / num_steps, num_workers))
            losses.append(sum(loss for _, loss in found) / num_workers)
        apart = _apart(replicas)
        if sync is not None:
            sync(replicas, aggregator.lost)
    return Outcome({split: _accuracy(task, replicas, split) for split in ("train", "test")}, losses, apart)


def _accuracy(task: Task, replicas: Sequence[Replica], split: str) -> float:
    right = total = 0
    for part, replica in enumerate(replicas):
        replica.model.eval()
        with torch.no_grad():
            some, of = task.right(replica.model, split, part, len(replicas))
        right, total = right + some, total + of
    return right / total


def _apart(replicas: Sequence[Replica]) -> float:
    each = torch.stack([replica.flat() for replica in replicas])
    mean = each.mean(0)
    return float(((each - mean) ** 2).sum(1).mean().sqrt() / mean.norm())
