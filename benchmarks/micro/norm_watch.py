"""What the norm watch sees: false alarms in real trainings, injected faults, and what it costs.

Ranks train a workload together, in one process: each computes its own gradients, whose mean all apply. In every step,
the norms of all gradients are judged as in a job that watches every step, and as in one that watches every 16th; of
that one there are 16, each at other steps. What is found without a fault is a false alarm. Before the ranks learn from
the norms, each kind of fault is tried at one rank and one tensor drawn at random, without an effect on the training. A
fault is detected if that rank and that tensor are reported. A flip that leaves NaN or infinity is not tried: such a
step is rolled back, and needs no watch. The first watched steps of a job, which are not judged, are not counted.

The cost is processor time of `benchmarks.micro.hundred_tensors`, with and without the watch in turns, and the time that
one core takes for the norm of a large tensor.
"""

# Shapes: W = ranks, T = tensors

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.micro.hundred_tensors import connected
from benchmarks.options import listed
from gradwire.bench.statistics import Spread
from gradwire.bench.workload import Workload
from gradwire.bench.workloads import make_workload
from gradwire.sync.norm_watch import MIN_SAMPLES, NormStatistics
from gradwire.sync.options import SyncOptions

Row = dict[str, Any]
WORKLOADS = ("text", "digits", "deep")
INTERVALS = (1, 16)
COST = "cost"
KEY, CHOICES = ("workload", "ranks"), ("workloads", "ranks")
LARGE = 1 << 24  # elements

Fault = Callable[[torch.Tensor, np.random.Generator], float]
"""The change of a gradient's squared norm, float64; NaN or infinity if the gradient is no longer finite."""


def flip(bit: int) -> Fault:
    """Flip one bit of one element, drawn at random."""

    def change(grad: torch.Tensor, generator: np.random.Generator) -> float:
        element = grad.reshape(-1)[int(generator.integers(grad.numel()))].numpy().reshape(1)
        flipped = (element.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
        return float(flipped[0]) ** 2 - float(element[0]) ** 2

    return change


def scaled(factor: float, share: int) -> Fault:
    """Multiply a part of the elements by a factor: the first of `share` equal ranges, as one owner's chunk."""

    def change(grad: torch.Tensor, generator: np.random.Generator) -> float:
        part = grad.reshape(-1)[: max(1, grad.numel() // share)].double()
        return float(part @ part) * (factor**2 - 1)

    return change


FAULTS: dict[str, Fault] = {
    **{f"bit {bit} of an element flips": flip(bit) for bit in (30, 29, 28, 27, 26, 25, 24, 23, 22)},
    **{f"tensor x 2^{power}": scaled(2.0**power, 1) for power in (8, 4, 3, 2, 1, -2, -3, -4, -8)},
    **{f"a quarter x 2^{power}": scaled(2.0**power, 4) for power in (8, 4, 3, 2, 1)},
    "tensor x -1": scaled(-1.0, 1),
}


def train(task: Workload, ranks: int, steps: int, seed: int) -> Iterator[list[Sequence[torch.Tensor]]]:
    """Train on the means of all ranks' gradients, and yield the gradients of each rank in each step."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.schedule(step, steps))
    parameters = list(model.parameters())
    for step in range(steps):
        found = []
        for rank in range(ranks):
            inputs, targets = task.batch(seed, step, rank, ranks)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            found.append(torch.autograd.grad(loss, parameters))
        yield found
        for parameter, *grads in zip(parameters, *found, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        optimizer.step()
        schedule.step()


class Tally:
    """Counts of one interval, over all trainings."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.judged = self.alarms = 0
        self.tried: Counter[str] = Counter()
        self.detected: Counter[str] = Counter()
        self._jobs: list[NormStatistics] = []

    def begin(self, ranks: int, tensors: int) -> None:
        """Begin a training, in as many jobs as there are steps in the interval."""
        self._jobs = [NormStatistics(ranks, tensors) for _ in range(self.interval)]

    def take(self, step: int, norms: np.ndarray, faults: dict[str, tuple[int, int, float]]) -> None:
        """Judge a step, float64[W, T], without faults and with each of them: rank, tensor and norm."""
        statistics = self._jobs[step % self.interval]
        if step // self.interval >= MIN_SAMPLES:
            self.judged += norms.size
            self.alarms += len(statistics.judge(norms))
            for name, (rank, tensor, norm) in faults.items():
                changed = norms.copy()
                changed[rank, tensor] = norm
                self.tried[name] += 1
                self.detected[name] += any(jump[:2] == (rank, tensor) for jump in statistics.judge(changed))
        statistics.learn(norms)


def study(workload: str, ranks: int, steps: int, seeds: int) -> Iterator[Row]:
    """False alarms and detected faults of one workload."""
    task = make_workload(workload)
    tensors = len(list(task.model().parameters()))
    tallies = [Tally(interval) for interval in INTERVALS]
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        for tally in tallies:
            tally.begin(ranks, tensors)
        for step, grads in enumerate(train(task, ranks, steps, seed)):
            norms = np.array([[float(torch.linalg.vector_norm(grad)) for grad in own] for own in grads])
            faults = {}
            for name, fault in FAULTS.items():
                rank, tensor = int(generator.integers(ranks)), int(generator.integers(tensors))
                square = norms[rank, tensor] ** 2 + fault(grads[rank][tensor], generator)
                if math.isfinite(square):
                    faults[name] = rank, tensor, math.sqrt(max(0.0, square))
            for tally in tallies:
                tally.take(step, norms, faults)
    where = {"workload": workload, "ranks": ranks, "tensors": tensors, "source": "measured", "rate": "none"}
    for tally in tallies:
        here = where | {"interval": tally.interval, "unit": "count", "samples": tally.judged}
        yield here | {"metric": "false alarms", "value": tally.alarms}
        for name in FAULTS:
            detected = {"metric": "detected", "method": name, "value": tally.detected[name]}
            yield here | detected | {"samples": tally.tried[name]}


def cost(repetitions: int, steps: int) -> Iterator[Row]:
    """Processor time of a step with and without the watch, and time of the norm of a large tensor."""
    found: dict[int, list[float]] = {0: [], 16: [], 1: []}
    for _ in range(repetitions):
        for interval, seconds in found.items():
            with connected("threelc", SyncOptions(watch_norms=interval)) as take:
                take(16)
                began = time.process_time()
                take(steps)
                seconds.append((time.process_time() - began) / steps / 4)
    where = {"workload": COST, "ranks": 4, "source": "measured", "rate": "none"}
    for interval, seconds in found.items():
        spread = Spread.of(seconds)
        figures = {"value": spread.median, "p20": spread.p20, "p80": spread.p80, "samples": spread.size}
        yield where | {"metric": "processor", "unit": "s", "interval": interval, "size": 100 * 64 * 64, **figures}
    large, times = torch.randn(LARGE), []
    for _ in range(repetitions):
        began = time.perf_counter()
        torch.linalg.vector_norm(large)
        times.append((time.perf_counter() - began) / LARGE)
    spread = Spread.of(times)
    figures = {"value": spread.median, "p20": spread.p20, "p80": spread.p80, "samples": spread.size}
    yield where | {"ranks": 4, "metric": "norm of an element", "unit": "s", "interval": 1, "size": LARGE, **figures}


def run(
    workloads: Annotated[str, typer.Option(help="Workloads, such as text,digits, or cost.")] = "",
    ranks: Annotated[int, typer.Option(help="Ranks that train together.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 480,
    seeds: Annotated[int, typer.Option(help="Trainings of each workload.")] = 1,
    repetitions: Annotated[int, typer.Option(help="How often the cost is timed.")] = 9,
) -> Iterator[Row]:
    """All workloads, and the cost."""
    for workload in listed(workloads, (*WORKLOADS, COST)):
        yield from cost(repetitions, 48) if workload == COST else study(workload, ranks, steps, seeds)


def table(rows: Sequence[Row]) -> str:
    """Rates of false alarms, a table of faults by workload, and the cost."""
    lines, columns = [], {(row["workload"], row["ranks"]): None for row in rows if row["workload"] != COST}
    for row in rows:
        if row["metric"] == "false alarms" and row["samples"]:
            most = _most(row["value"]) / row["samples"]
            lines.append(
                f"{row['workload']}, {row['ranks']} ranks, every {row['interval']}: {row['value']} false alarms among "
                f"{row['samples']:,} norms of {row['tensors']} tensors (below {most:.1e} at 95 %)"
            )
    for interval in INTERVALS if columns else ():
        lines.append(f"\ndetected, every {interval:<16}" + "".join(f"{name:>12}" for name, _ in columns))
        for fault in FAULTS:
            cells = [_share(rows, fault, interval, *column) for column in columns]
            lines.append(f"{fault:32}" + "".join(f"{cell:>12}" for cell in cells))
    for row in rows:
        if row["metric"] == "processor":
            what = f"every {row['interval']}" if row["interval"] else "off"
            spread = f"{1e3 * row['p20']:.3f}-{1e3 * row['p80']:.3f}"
            lines.append(f"{what:9} {1e3 * row['value']:.3f} ms of processor time a step and rank ({spread})")
        elif row["metric"] == "norm of an element":
            lines.append(f"norm of a large tensor: {1e9 * row['value']:.3f} ns an element")
    return "\n".join(lines)


def _most(count: int) -> float:
    """Upper end of the 95 % interval of a Poisson mean of which `count` were seen, one-sided; Wilson and Hilferty's."""
    count += 1
    return float(count * (1 - 1 / (9 * count) + 1.645 / (3 * math.sqrt(count))) ** 3)


def _share(rows: Sequence[Row], fault: str, interval: int, workload: str, ranks: int) -> str:
    for row in rows:
        same = row["workload"] == workload and row["ranks"] == ranks and row["interval"] == interval
        if same and row.get("method") == fault:
            return f"{100 * row['value'] / row['samples']:.1f} %" if row["samples"] else "-"
    return "-"
