"""3LC and its rivals over trainings of many epochs: accuracies of table 1 and figures 4 to 8 of the 3LC paper.

`--data` is CIFAR-10 as images, see `benchmarks.data.cifar`. Four workers and a parameter server are simulated in one
process (`simulated_server`): codecs, residuals and the server's optimizer are those of a job, and only the network is
missing, since it does not change what is learned. Step times are those of `training`, whose model has 308 thousand
parameters instead of 272 thousand.

Each training is written as it ends, and none is repeated, so the command may be stopped and started again at any time.
With `--minutes`, no training starts after that time. `rates` trains the float baseline for a few learning rates, of
which the best, `RATE`, is used by all. `why` has designs that tell what costs accuracy: the compression of one
direction alone, and a scale that overstates what is sent (option `fit` of `ternary`).

Gradients can be computed on a GPU, whose sums round otherwise; everything else stays on the CPU.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 5. Differences: ResNet-20 instead of ResNet-110, images of 16 × 16
pixels, 4 workers instead of 10, 20 epochs instead of 164, with a warm-up over the first twentieth; the learning rate
is tuned for the float baseline; all workers update the statistics of batch normalization.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

from benchmarks.catalog import RESULTS
from benchmarks.data.cifar import ResNet, Split, load
from benchmarks.intervals import interval
from benchmarks.keys import key_of
from benchmarks.options import Cifar10, Seeds, choose, listed
from benchmarks.papers.threelc import training
from benchmarks.papers.threelc.gradients import OnCpu, OnGpu
from benchmarks.papers.threelc.simulated_server import Exchange, SimulatedServer
from benchmarks.plotting import figure, plain_numbers
from gradwire.bench.records import read_figures
from gradwire.bench.table import rate_text

WORKERS, BATCH, EPOCHS = 4, 32, 20
RATE, LAST_RATE, MOMENTUM, DECAY = 0.2, 0.01, 0.9, 1e-4
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)  # for all workers together
SIDE, MARGIN = 16, 2  # pixels
PARTS = ("learn", "shares", "rates", "why")
SHARES = (0.25, 0.5, 0.75)
KEY, CHOICES = ("method", "seed", "share", "epochs", "learning_rate"), ("seeds", "parts", "designs", "minutes")
Row = dict[str, Any]


@dataclass(frozen=True)
class Design:
    """One way to exchange state changes.

    Attributes:
        label: Name in the record.
        exchange: How gradients and updates are encoded.
        local_steps: Number of steps whose gradients are added and exchanged together.
    """

    label: str
    exchange: Exchange
    local_steps: int = 1


FLOAT = "32-bit float"
DESIGNS = tuple(
    Design(each.label, Exchange(each.compressor, each.compressor, each.feedback), each.local_steps)
    for each in training.DESIGNS
    if each.label not in ("25% sparsification", "3LC (no ZRE)")  # not in the table; the same values as with it
)
SHARED = (FLOAT, "3LC (s=1.00)", "3LC (s=1.75)")
SPARSE, FITTED = "threelc:sparsity=1.9", "ternary:sparsity={}:zero_run=True:fit=True"
WHY = (
    Design("3LC (s=1.90), pushes only", Exchange(SPARSE, "none")),
    Design("3LC (s=1.90), pulls only", Exchange("none", SPARSE)),
    *(Design(f"3LC (s={s:.2f}), fitted", Exchange(FITTED.format(s), FITTED.format(s))) for s in (1.75, 1.9)),
)


# -- one training ----------------------------------------------------------------------------------------------------


def small(split: Split) -> Split:
    """The same images with 16 × 16 pixels, uint8."""
    halves = [functional.avg_pool2d(part.float(), 2).round_().to(torch.uint8) for part in split[0].split(5000)]
    return torch.cat(halves), split[1]


def cropped(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Images moved by up to `MARGIN` pixels in both directions, and flipped, at random."""
    count = len(images)
    padded = functional.pad(images, (MARGIN,) * 4)
    down, right = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), generator=generator)
    across = torch.arange(SIDE).expand(count, SIDE)
    flips = torch.rand(count, 1, generator=generator) < 0.5
    columns = right + torch.where(flips, across.flip(1), across)
    rows = down + across
    found: torch.Tensor = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2).contiguous()


def learning_rate(step: int, steps: int, rate: float) -> float:
    """Cosine decay without restarts to a hundredth, after a warm-up of a twentieth of the steps."""
    warm = min(1.0, (step + 1) / max(1.0, steps / 20))
    last = LAST_RATE * rate
    return warm * (last + (rate - last) * (1 + math.cos(math.pi * step / steps)) / 2)


class Training:
    """One training.

    Args:
        design: How state changes are exchanged.
        data: Training and test images.
        steps: Number of steps.
        rate: Largest learning rate.
        seed: Seed of model, data and random streams.
        device: Where gradients are computed: ``"cpu"``, or a GPU.
    """

    def __init__(
        self, design: Design, data: tuple[Split, Split], steps: int, rate: float, seed: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        self.design, self.steps, self.rate = design, steps, rate
        self.train, self.test = data
        self.model = ResNet(blocks=3, width=16, stride=1)
        self.parameters = list(self.model.parameters())
        self.num_parameters = sum(each.numel() for each in self.parameters)
        self.optimizer = torch.optim.SGD(self.parameters, lr=rate, momentum=MOMENTUM, weight_decay=DECAY)
        self.server = SimulatedServer(self.model, self.optimizer, WORKERS, design.exchange, seed)
        self.generator = torch.Generator().manual_seed(seed)
        gpu = device != "cpu"
        self.compute = OnGpu(self.model, WORKERS, BATCH, torch.device(device)) if gpu else OnCpu(self.model)

    def run(self) -> Iterator[Row]:
        """Train, and report on each twentieth of the steps, and on the end."""
        losses: list[float] = []
        bits: dict[str, list[float]] = {"pushed": [], "pulled": []}
        marks = {round((part + 1) * self.steps / 20) for part in range(20)}
        held_out = self.test[0][::5], self.test[1][::5]
        sums = [[torch.zeros_like(each) for each in self.parameters] for _ in range(WORKERS)]
        for step in range(self.steps):
            self.optimizer.param_groups[0]["lr"] = learning_rate(step, self.steps, self.rate)
            gradients, loss = self._gradients()
            losses.append(loss)
            if self.design.local_steps > 1:
                for total, own in zip(sums, gradients):
                    torch._foreach_add_(total, own)
                gradients = sums
            sent = dict.fromkeys(bits, 0.0)
            if (step + 1) % self.design.local_steps == 0:
                self.server.step(gradients)
                sent = {"pushed": self.server.pushed, "pulled": self.server.pulled}
                for each in sums:
                    torch._foreach_zero_(each)
            for way, found in bits.items():
                found.append(8 * sent[way] / self.num_parameters)
            if step + 1 in marks:
                at = {"step": step + 1}
                yield {**at, "metric": "loss", "value": statistics.fmean(losses)}
                yield {**at, "metric": "accuracy_at", "value": self.compute.accuracy(held_out), "unit": "share"}
                for way, found in bits.items():
                    yield {**at, "metric": f"bits_{way}_at", "value": statistics.fmean(found), "unit": "bit"}
                for way, norm in self.server.residuals().items():
                    yield {**at, "metric": f"residual_{way}", "value": norm}
                losses, bits = [], {"pushed": [], "pulled": []}
        if not self.server.same():
            raise AssertionError("The workers hold different parameters.")
        yield {"metric": "accuracy", "value": self.compute.accuracy(self.test), "unit": "share"}

    def _gradients(self) -> tuple[list[list[torch.Tensor]], float]:
        """Gradients of all workers, and their mean loss."""
        index = torch.randint(0, len(self.train[1]), (WORKERS, BATCH), generator=self.generator)
        batches = [(cropped(self.train[0][each], self.generator), self.train[1][each]) for each in index]
        found, losses = self.compute.step(batches)
        return found, statistics.fmean(losses)


# -- the record --------------------------------------------------------------------------------------------------------


def trainings(
    parts: Sequence[str], seeds: int, designs: Sequence[Design]
) -> Iterator[tuple[Design, int, float, float]]:
    """Design, seed, share of the steps, and learning rate of each training."""
    if "rates" in parts:
        yield from ((DESIGNS[0], 0, 1.0, rate) for rate in RATES)
    if "learn" in parts:
        yield from ((design, seed, 1.0, RATE) for seed in range(seeds) for design in designs if design in DESIGNS)
    if "why" in parts:
        yield from ((design, 0, 1.0, RATE) for design in designs if design in WHY)
    if "shares" in parts:
        chosen = [design for design in designs if design.label in SHARED]
        yield from ((design, 0, share, RATE) for share, design in itertools.product(SHARES, chosen))


def run(
    data: Cifar10,
    seeds: Seeds = 3,
    epochs: Annotated[int, typer.Option(help="Epochs of a whole training. The record has 20.")] = EPOCHS,
    designs: Annotated[str, typer.Option(help="Labels of designs, with | in between.")] = "",
    parts: Annotated[str, typer.Option(help="learn, shares, rates, why.")] = "",
    minutes: Annotated[float, typer.Option(help="Start no training after this time.")] = math.inf,
    device: Annotated[str, typer.Option(help="Where gradients are computed: cpu, or cuda.")] = "cpu",
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[list[Row]]:
    """Train what the record does not have, one after another."""
    end = time.monotonic() + 60 * minutes
    known = [design.label for design in (*DESIGNS, *WHY)]
    labels = listed(designs.replace("|", ","), known)
    chosen = [design for design in (*DESIGNS, *WHY) if design.label in labels]
    images = small(load(data, "train")), small(load(data, "test"))
    for design, seed, share, rate in trainings(choose(parts, PARTS), seeds, chosen):
        if key_of(described(design, seed, share, epochs, rate), KEY) in done or time.monotonic() > end:
            continue
        yield trained(images, design, seed, share, epochs, rate, device)


def described(design: Design, seed: int, share: float, epochs: int, rate: float) -> Row:
    """Columns that all rows of a training share."""
    return {
        "method": design.label, "seed": seed, "share": share, "epochs": epochs, "learning_rate": rate,
        "ranks": WORKERS, "dtype": "float32", "source": "measured", "rate": "none",
    }  # fmt: skip


def trained(
    images: tuple[Split, Split], design: Design, seed: int, share: float, epochs: int, rate: float, device: str
) -> list[Row]:
    """The rows of one training."""
    begun = time.monotonic()
    whole = epochs * len(images[0][1]) // (WORKERS * BATCH)
    one = Training(design, images, round(share * whole), rate, seed, device)
    fixed = described(design, seed, share, epochs, rate) | {"size": one.num_parameters, "steps": one.steps}
    if device != "cpu":
        fixed["device"] = torch.cuda.get_device_name(device)
    rows = [{**fixed, **row} for row in one.run()]
    spent = (time.monotonic() - begun) / 60
    print(f"{design.label:20} seed {seed}, {share:.0%}: {rows[-1]['value']:.2%} in {spent:.1f} min", flush=True)
    return rows


# -- tables and plots ----------------------------------------------------------------------------------------------


def values(rows: Sequence[Row], label: str, metric: str = "accuracy", share: float = 1.0) -> dict[int, float]:
    """The last value of a metric by seed."""
    wanted = {"method": label, "metric": metric, "share": share, "learning_rate": RATE}
    return {row["seed"]: row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())}


def table(rows: Sequence[Row]) -> str:
    """Markdown table: accuracy, difference from float with its interval, and bits pushed and pulled a parameter."""
    lines = [
        "| design | accuracy, % | difference, points | in the paper | bits a parameter |", "|---|---|---|---|---|",
    ]  # fmt: skip
    base = values(rows, FLOAT)
    paper = {each.label: each.paper[-1] for each in training.DESIGNS}
    for design in (*DESIGNS, *WHY):
        found = values(rows, design.label)
        both = sorted(found.keys() & base.keys())
        if not both:
            continue
        mean = 100 * statistics.fmean(found.values())
        difference, half = interval([100 * (found[seed] - base[seed]) for seed in both])
        spread = "" if math.isnan(half) else f" ± {half:.2f}"
        bits = " + ".join(f"{mean_bits(rows, design.label, way):.2f}" for way in ("pushed", "pulled"))
        said = f"{paper[design.label]:+.2f}" if design.label in paper else ""
        lines.append(f"| {design.label} | {mean:.2f} | {difference:+.2f}{spread} | {said} | {bits} |")
    rates = [row for row in rows if row["method"] == FLOAT and row["metric"] == "accuracy" and row["share"] == 1.0]
    tuned = {row["learning_rate"]: row["value"] for row in rates if row["seed"] == 0}
    if len(tuned) > 1:
        said = ", ".join(f"{rate:g}: {100 * value:.2f} %" for rate, value in sorted(tuned.items()))
        lines += ["", f"{FLOAT}, seed 0, by learning rate: {said}."]
    return "\n".join(lines)


def mean_bits(rows: Sequence[Row], label: str, way: str) -> float:
    """Bits a parameter and step, mean over the trainings."""
    wanted = {"method": label, "metric": f"bits_{way}_at", "share": 1.0, "learning_rate": RATE}
    return statistics.fmean(row["value"] for row in rows if all(row[key] == value for key, value in wanted.items()))


def course(rows: Sequence[Row], label: str, metric: str) -> list[tuple[int, float]]:
    """Step and value of a metric in the course of whole trainings, mean of the seeds."""
    wanted = {"method": label, "metric": metric, "share": 1.0, "learning_rate": RATE}
    found: dict[int, list[float]] = {}
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()):
            found.setdefault(row["step"], []).append(row["value"])
    return [(step, statistics.fmean(each)) for step, each in sorted(found.items())]


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot accuracy by share of the steps, accuracy and residuals in the course of a training, and accuracy by time."""
    colors = [f"C{index}" for index in range(10)] + ["#1f2933", "#9aa5b1", "#5a3d8a", "#b08900"]
    designs = dict(zip((*DESIGNS, *WHY), colors))
    with figure(folder / "threelc-epochs.svg", columns=3, size=(15, 4.4)) as axes:
        shares, accuracies, residuals = axes[0]
        for design, color in designs.items():
            points = [
                (100 * share, 100 * statistics.fmean(found.values()))
                for share in (*SHARES, 1.0)
                if (found := values(rows, design.label, share=share))
            ]
            if points:
                shares.plot(*zip(*points), marker="o", markersize=4, label=design.label, color=color)
            for axis, metric, unit in ((accuracies, "accuracy_at", 100), (residuals, "residual_push", 1)):
                if points := [(step, unit * value) for step, value in course(rows, design.label, metric)]:
                    axis.plot(*zip(*points), color=color)
        shares.set(xlabel="share of the steps, %", ylabel="test accuracy, %")
        shares.legend(fontsize=7)
        accuracies.set(xlabel="step", ylabel="accuracy on every fifth test image, %")
        residuals.set(xlabel="step", ylabel="norm of a worker's residual")
    timed = read_figures(RESULTS / "threelc.csv")
    with figure(folder / "threelc-epochs-time.svg", columns=3, size=(15, 4.4), sharey=True) as axes:
        for axis, rate in zip(axes[0], training.SHORT_STEPS):
            for design, color in designs.items():
                seconds = training.values(timed, design.label, "step", rate)
                points = [
                    (step * statistics.fmean(seconds) / 60, 100 * value)
                    for step, value in course(rows, design.label, "accuracy_at")
                    if seconds
                ]
                if points:
                    axis.plot(*zip(*points), label=design.label, color=color)
            axis.set(xscale="log", xlabel=f"minutes at {rate_text(rate)}")
            plain_numbers(axis.xaxis)
        axes[0][0].set_ylabel("accuracy on every fifth test image, %")
        axes[0][0].legend(fontsize=7)
