"""Workloads: a model, real data that every machine has, and the order in which ranks see it.

Model, batches and validation set depend only on the seed, the step and the rank, so that every method trains on the
same data in the same order. Nothing is downloaded.
"""
# Shapes: B = samples of one rank's batch

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import nn


class Samples(NamedTuple):
    """Inputs and targets along the first dimension. Targets are classes, or probabilities if there are several."""

    inputs: torch.Tensor
    targets: torch.Tensor  # (B), or (B, T) with one class per position; float32 (B, V) for probabilities

    @property
    def has_probabilities(self) -> bool:
        """Whether targets are probabilities of classes."""
        return self.targets.is_floating_point()

    @property
    def num_predictions(self) -> int:
        """Number of predictions to make."""
        return len(self.targets) if self.has_probabilities else self.targets.numel()


class Workload(ABC):
    """A classification task with its model and optimizer."""

    name: ClassVar[str]
    summary: ClassVar[str]
    batch_size: ClassVar[int]
    """B, of each rank."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, initialized from torch's global random state."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer for all methods, tuned for fp32 gradients."""

    @abstractmethod
    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """The B samples that `rank` trains on in `step`."""

    @abstractmethod
    def validation(self) -> Samples:
        """Samples that are in no batch."""

    def schedule(self, step: int, steps: int) -> float:
        """Factor of the learning rate in `step` of `steps`. Also called for later steps."""
        return 1.0


def batch_generator(seed: int, step: int, rank: int, world_size: int) -> torch.Generator:
    """A separate random stream for each batch, so that ranks are independent of each other's progress."""
    # Hashed, because torch's CPU generator uses only 32 bits of its seed.
    place = f"{seed}/{step}/{rank}/{world_size}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "little"))


def iterate(workload: Workload, seed: int, rank: int, world_size: int) -> Iterator[Samples]:
    """The batches of one rank from step 0 on, without end."""
    return (workload.batch(seed, step, rank, world_size) for step in itertools.count())


def evaluate(model: nn.Module, samples: Samples, chunk: int = 1024) -> tuple[float, int]:
    """Sum of the cross-entropy and number of correct predictions over `samples`.

    If a sample has several classes, predicting any of them is correct (precision at 1).
    """
    loss, right = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(samples.targets), chunk):
            inputs, targets = (part[start : start + chunk] for part in samples)
            logits = model(inputs)
            loss += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            predicted = logits.argmax(1)
            if samples.has_probabilities:
                right += int((targets.gather(1, predicted.unsqueeze(1)) > 0).sum())
            else:
                right += int((predicted == targets).sum())
    return loss, right
