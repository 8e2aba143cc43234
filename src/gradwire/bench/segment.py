"""One segment of a job on one rank: a method trains the workload, for its loss curve and for its step time.

The loss curve comes first, then the timed steps go on with the same model, so that bytes that depend on the
gradients' values are those of a model in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods
from gradwire.bench.job import Outcome, Progress, Segment, Timed
from gradwire.bench.methods import Connection
from gradwire.bench.statistics import wire_seconds
from gradwire.bench.workload import Samples, evaluate, iterate
from gradwire.lab.counters import Counters, interface_counters
from gradwire.lab.units import parse_rate
from gradwire.sync.replica import fingerprint

if TYPE_CHECKING:
    from gradwire.bench.worker import Rank


@dataclass
class Training:
    """A model in training, and what its steps have cost so far."""

    rank: Rank
    segment: Segment
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    connection: Connection
    batches: Iterator[Samples]
    steps: int = 0

    @classmethod
    def begin(cls, rank: Rank, segment: Segment) -> Training:
        """From the job's seed, the same for every method."""
        torch.manual_seed(rank.job.seed)
        model = rank.workload.model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=segment.bucket_mb, gradient_as_bucket_view=True)
        optimizer = rank.workload.optimizer(model)
        connection = methods.connect(segment.method, ddp, optimizer, rank.job.seed)
        batches = iterate(rank.workload, rank.job.seed, rank.rank, rank.world_size)
        return cls(rank, segment, ddp, optimizer, connection, batches)

    def step(self) -> tuple[float, float]:
        """One step; returns its loss and its seconds."""
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


def run_segment(rank: Rank, index: int) -> Outcome:
    """Train for the loss curve, validate, then time steps at each rate."""
    segment = rank.job.segments[index]
    rank.set_rate(None)
    training = Training.begin(rank, segment)
    losses, seconds = _train(training, index)
    loss, accuracy = _validate(training) if segment.train_steps else (None, None)
    timed = [_time(training, index, rate) for rate in segment.rates] if segment.min_timed else []
    rank.set_rate(None)
    identical = None if segment.method == methods.SILENT else _is_identical(training.ddp)
    training.connection.close()
    return Outcome(index, rank.rank, losses, seconds, loss, accuracy, identical, timed)


def _train(training: Training, index: int) -> tuple[list[float], list[float]]:
    losses, seconds = [], []
    steps = training.segment.train_steps
    for step in range(1, steps + 1):
        loss, duration = training.step()
        losses.append(loss)
        seconds.append(duration)
        training.rank.progress(Progress(index, "train", step, steps, loss=loss))
    return losses, seconds


def _validate(training: Training) -> tuple[float, float]:
    """Each rank takes a share of the validation set; their replicas are the same."""
    rank, samples = training.rank, training.rank.workload.validation()
    share = slice(rank.rank, None, rank.world_size)
    loss, right = evaluate(training.ddp.module, Samples(samples.inputs[share], samples.targets[share]))
    sums = torch.tensor([loss, right], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0]) / len(samples.targets), float(sums[1]) / len(samples.targets)


def _time(training: Training, index: int, rate: str | None) -> Timed:
    rank, segment = training.rank, training.segment
    # One step before the links are shaped: compiles kernels, lets DDP order its buckets, and tells the bytes.
    before = training.connection.costs(training.steps)
    _, duration = training.step()
    sent = (training.connection.costs(training.steps) - before).sent_bytes
    steps = rank.agree(_num_timed(segment, duration, sent, rate))
    rank.set_rate(rate)
    for _ in range(segment.warmup_steps):
        training.step()
    dist.barrier()
    counters, costs, seconds = _interface(rank), training.connection.costs(training.steps), []
    for step in range(1, steps + 1):
        seconds.append(training.step()[1])
        rank.progress(Progress(index, "timed", step, steps, rate=rate))
    spent = training.connection.costs(training.steps) - costs
    dist.barrier()  # all that was sent has arrived
    return _timed(rate, seconds, spent, _traffic(rank, counters))


def _timed(rate: str | None, seconds: list[float], spent: methods.Costs, traffic: Counters | None) -> Timed:
    return Timed(
        rate,
        seconds,
        spent.sent_bytes,
        spent.dense_bytes,
        spent.encode_seconds,
        spent.decode_seconds,
        traffic.bytes_sent if traffic else None,
        traffic.packets_sent if traffic else None,
    )


def _num_timed(segment: Segment, unshaped_seconds: float, sent_bytes: int, rate: str | None) -> int:
    expected = max(unshaped_seconds, wire_seconds(sent_bytes, parse_rate(rate)))
    return max(segment.min_timed, min(segment.max_timed, round(segment.timed_seconds / expected)))


def _interface(rank: Rank) -> Counters | None:
    return interface_counters() if rank.job.shaped else None


def _traffic(rank: Rank, earlier: Counters | None) -> Counters | None:
    return interface_counters() - earlier if earlier else None


def _is_identical(module: nn.Module) -> bool:
    """Whether all ranks hold the same bits."""
    mine = torch.tensor([fingerprint(module.parameters())], dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return all(torch.equal(mine, other) for other in all_ranks)
