"""One segment of a job on one rank: train the workload with a method, for a loss curve and step times.

The loss curve comes first. The timed steps continue with the same model, so that bytes that depend on the values of
gradients are those of a model in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods
from gradwire.bench.job import Progress, Segment, SegmentOutcome
from gradwire.bench.rank import Rank
from gradwire.bench.timing import Steps, time_steps
from gradwire.bench.workload import Samples, evaluate, iterate
from gradwire.sync.replica import fingerprint


@dataclass
class Training(Steps):
    """A model in training."""

    batches: Iterator[Samples]

    @classmethod
    def begin(cls, rank: Rank, segment: Segment) -> Training:
        """Start from the job's seed, which is the same for every method."""
        torch.manual_seed(rank.job.seed)
        model = rank.workload.model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=segment.bucket_mb, gradient_as_bucket_view=True)
        optimizer = rank.workload.optimizer(model)
        connection = methods.connect(segment.method, ddp, optimizer, rank.job.seed)
        batches = iterate(rank.workload, rank.job.seed, rank.rank, rank.world_size)
        return cls(rank, segment, ddp, optimizer, connection, batches)

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        factor = self.rank.workload.schedule(self.steps, self.segment.train_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group.setdefault("full_lr", group["lr"])
        inputs, targets = next(self.batches)
        loss = nn.functional.cross_entropy(self.ddp(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        return loss.item(), time.perf_counter() - start


def run_segment(rank: Rank, index: int) -> SegmentOutcome:
    """Train for the loss curve, validate, then time steps at each rate."""
    segment = rank.job.segments[index]
    rank.set_rate(None)
    training = Training.begin(rank, segment)
    rank.set_rate(segment.train_rate)
    before = training.connection.costs(training.steps)
    losses, seconds, validations = _train(training, index)
    spent = training.connection.costs(training.steps) - before
    rank.set_rate(None)
    if not training.steps:
        training.step()  # compiles kernels, and lets DDP order its buckets
    loss, accuracy = _validate(training) if segment.train_steps else (None, None)
    timed = [time_steps(training, index, rate) for rate in segment.rates] if segment.min_timed else []
    rank.set_rate(None)
    identical = None if segment.method == methods.SILENT else is_identical(training.ddp.parameters())
    training.connection.close()
    return SegmentOutcome(
        index, rank.rank, losses, seconds, spent.sent_bytes, loss, accuracy, identical, timed, validations
    )


def _train(training: Training, index: int) -> tuple[list[float], list[float], list[tuple[int, float, float]]]:
    losses, seconds, validations = [], [], []
    steps, every = training.segment.train_steps, training.segment.validate_every
    for step in range(1, steps + 1):
        loss, duration = training.step()
        losses.append(loss)
        seconds.append(duration)
        training.rank.progress(Progress(index, "train", step, steps, loss=loss))
        if every and step % every == 0:
            validations.append((step, *_validate(training)))
    return losses, seconds, validations


def _validate(training: Training) -> tuple[float, float]:
    """Validation loss and accuracy. Each rank evaluates a share of the validation set."""
    rank, samples = training.rank, training.rank.workload.validation()
    share = slice(rank.rank, None, rank.world_size)
    training.ddp.module.eval()
    loss, right = evaluate(training.ddp.module, Samples(samples.inputs[share], samples.targets[share]))
    training.ddp.module.train()
    sums = torch.tensor([loss, right], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0]) / samples.num_predictions, float(sums[1]) / samples.num_predictions


def is_identical(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    mine = torch.tensor([fingerprint(tensors)], dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return all(torch.equal(mine, other) for other in all_ranks)
