"""Time of one all-reduce of a model's gradients in the lab, compared with Gloo's: figure 10 of GCOMP's paper.

Four hosts of the lab have one rank each. The gradients are those of the text workload's matrices (6.3 million elements)
after nine steps, each rank's from its own batch, with the optimizer state of that step. All are submitted at once, and
the all-reduce ends when the last rank has all means: no backward pass hides it. Times are those of the slowest rank;
load is the time of all its threads over wall time. `K blocks` divides a rank's share into K blocks, so that hops
overlap with encoding. zlib and zstd (`pip install 'gradwire[bench]'`) travel on the same ring as `lossless`, each at
its fastest level.

All ranks share the cores of the machine. With two cores, the codecs of four ranks wait for each other, unlike on a
cluster.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import ranks as processes
from benchmarks.options import Rates, listed
from benchmarks.papers.gcomp import zipped
from gradwire.bench.extras import need
from gradwire.bench.workloads import make_workload
from gradwire.core.spec import TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.lab import Lab
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

RATES = ("250mbit", "1gbit", "10gbit")
KEY, CHOICES = ("rate",), ("rates",)
RANKS, TRAINED, REPEATS = 4, 9, 5
WAYS = (
    ("none", "ring", 1), ("fp16", "ring", 1),
    ("lossless", "ring", 1), ("lossless", "ring", 4), ("lossless", "scatter_reduce", 1),
    ("lossless:code=fixed", "ring", 1), ("zstd1", "ring", 1), ("zlib1", "ring", 1),
    ("gcomp", "ring", 1), ("gcomp", "ring", 4), ("gcomp", "scatter_reduce", 1),
)  # fmt: skip
"""Method, strategy, and blocks of each rank's share."""
Call = Callable[[], object]
Row = dict[str, Any]


class Gradients:
    """Gradients and optimizer state of a rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        workload = make_workload("text")
        self.model = workload.model()
        optimizer = workload.optimizer(self.model)
        self.named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.dim() > 1]
        self.state = OptimizerState(optimizer, self.named)
        for step in range(TRAINED + 1):
            batch = workload.batch(0, step, rank if step == TRAINED else 0, RANKS)
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch.inputs), batch.targets).backward()
            if step < TRAINED:
                optimizer.step()
        self.grads = {name: parameter.grad.clone() for name, parameter in self.named if parameter.grad is not None}
        self.nbytes = sum(grad.nbytes for grad in self.grads.values())

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: grad.clone() for name, grad in self.grads.items()}


def timed(prepare: Callable[[], Call]) -> dict[str, list[float]]:
    """Seconds of the slowest rank and load of the busiest rank for each repeat."""
    found: dict[str, list[float]] = {"seconds": [], "load": []}
    for repeat in range(REPEATS + 2):
        call = prepare()
        dist.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        call()
        spent = time.perf_counter() - begun
        figures = torch.tensor([spent, (time.process_time() - busy) / spent], dtype=torch.float64)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        if repeat >= 2:  # the first has the default tables
            for name, value in zip(found, figures.tolist(), strict=True):
                found[name].append(value)
    return found


def work() -> None:
    """What each host runs. Rank 0 prints the measurements."""
    zipped.add()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradients = Gradients(rank)
    found = {}

    def by_gloo() -> Call:
        flat = torch.cat([grad.reshape(-1) for grad in gradients.grads.values()])
        return lambda: dist.all_reduce(flat)

    found["Gloo"] = {**timed(by_gloo), "bytes": 2 * (RANKS - 1) * gradients.nbytes / RANKS}
    for method, strategy, num_blocks in WAYS:
        plan = Plan(method, strategy=strategy, partitions=num_blocks * RANKS, min_elements=0)
        specs = {name: TensorSpec.of(grad) for name, grad in gradients.grads.items()}
        synchronizer = Synchronizer(None, plan, tensors=specs, aux=gradients.state)
        sent: list[int] = []
        synchronizer.events.listen(lambda event, sent=sent: sent.append(event.nbytes) if event.kind == "send" else None)

        def by_gradwire(synchronizer: Synchronizer = synchronizer) -> Call:
            shards = [GradientSlice(name, grad) for name, grad in gradients.copies().items()]
            synchronizer.begin_step()

            def call() -> None:
                synchronizer.submit(shards)
                synchronizer.wait()

            return call

        blocks = f", {num_blocks} blocks" if num_blocks > 1 else ""
        figures = timed(by_gradwire)
        found[f"{method}, {strategy}{blocks}"] = {**figures, "bytes": sum(sent) / (REPEATS + 2)}
        synchronizer.close()
    if rank == 0:
        processes.say(size=gradients.nbytes // 4, found=found)
    dist.destroy_process_group()


def figures(rate: str, size: int, found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """Figures of one rate."""
    dense = statistics.median(found["Gloo"]["seconds"])
    for method, measured in found.items():
        fixed = {"method": method, "rate": rate, "dtype": "float32", "ranks": RANKS, "size": size,
                 "source": "measured"}  # fmt: skip
        for metric, unit in (("seconds", "s"), ("load", "cores")):
            values = measured[metric]
            low, high = (float(np.percentile(values, q)) for q in (20, 80))
            yield {**fixed, "metric": metric, "value": statistics.median(values), "unit": unit, "p20": low, "p80": high,
                   "samples": len(values)}  # fmt: skip
        yield {**fixed, "metric": "over Gloo", "value": statistics.median(measured["seconds"]) / dense, "unit": "ratio"}
        yield {**fixed, "metric": "sent", "value": measured["bytes"], "unit": "bytes"}


def run(rates: Rates = "") -> Iterator[Row]:
    """Run at all rates."""
    need("zstandard", extra="bench", purpose="a rival of lossless compression")
    for rate in listed(rates, RATES):
        with Lab(RANKS, rate) as lab:
            result = lab.run(processes.command(__name__, "work"), timeout=300).check()
        (said,) = processes.said(result)
        yield from figures(rate, **said)


def table(rows: Sequence[Row]) -> str:
    """One line for each figure."""
    return "\n".join(
        f"{row['rate']:8}{row['method']:30}{row['metric']:12}{row['value']:14.4g} {row['unit']}" for row in rows
    )
