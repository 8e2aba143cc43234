"""3LC and its rivals with a parameter server, on CIFAR-10: tables 1 and 2 and figures 4 to 9 of the 3LC paper.

`--data` is a folder of CIFAR-10 as images, see `benchmarks.data.cifar`. Four workers and a server train a ResNet in the
lab, each on a host of its own. As in the paper, accuracy is measured in whole trainings at one rate, since the rate
does not affect what is learned, and step times at each rate in others, which are short except for 3LC. Trainings that
the record has are not run again if they have the same model and number of steps. `--runs` repeats the short trainings,
so that speed-ups have intervals.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 5. Differences: 4 workers instead of 10; a ResNet with 8 layers and
308 thousand parameters, whose first convolution has a stride of 2; some hundred steps instead of 25,600; a learning
rate of 0.025 per worker instead of 0.1, at which 3LC with s = 1.75 diverges in this number of steps, with a warm-up
over the first twentieth; the processors compute for all workers and the server.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import ranks
from benchmarks.data.cifar import ResNet, load
from benchmarks.intervals import interval
from benchmarks.keys import key_of
from benchmarks.options import Cifar10, Seeds, choose
from benchmarks.plotting import figure
from gradwire.bench.table import rate_text
from gradwire.lab import Lab
from gradwire.lab.units import parse_rate

WORKERS = 4
FULL_RATE = "1gbit"
SHORT_STEPS = {"10mbit": 10, "100mbit": 40, FULL_RATE: 60}
PORT = 7070
FIRST = 3  # steps that are not timed: kernels are loaded, connections warm up
KEY = ("method", "rate", "seed", "share", "steps", "size")
CHOICES = ("seeds", "shares", "designs", "parts", "runs")
Row = dict[str, Any]


@dataclass(frozen=True)
class Design:
    """One way to exchange state changes.

    Attributes:
        label: Name in the paper.
        compressor: Compressor of gradients and updates.
        main: Whether it is part of figures 4 to 6.
        paper: Speed-ups at 10 and 100 Mb/s and 1 Gb/s, and the difference in accuracy, in points, in table 1.
        feedback: Whether residuals are kept. None leaves it to the compressor.
        local_steps: Number of steps that are exchanged together.
    """

    label: str
    compressor: str
    paper: tuple[float, float, float, float]
    main: bool = False
    feedback: bool | None = None
    local_steps: int = 1


DESIGNS = (
    Design("32-bit float", "none", (1, 1, 1, 0), main=True),
    Design("8-bit int", "int8:stochastic=false", (3.62, 3.47, 1.51, -0.04)),
    Design("Stoch 3-value + QE", "terngrad:clip=0", (12.3, 7.51, 1.53, -1.31), feedback=False),
    Design("MQE 1-bit int", "mqe1bit", (14.6, 7.40, 1.30, -0.16), main=True),
    Design("25% sparsification", "graddrop:ratio=0.25", (3.25, 3.11, 1.33, 0.03)),
    Design("5% sparsification", "graddrop:ratio=0.05", (8.98, 6.62, 1.44, -0.50), main=True),
    Design("2 local steps", "none", (1.92, 1.87, 1.38, -0.34), local_steps=2),
    Design("3LC (no ZRE)", "threelc:zero_run=false", (math.nan,) * 4),
    Design("3LC (s=1.00)", "threelc:sparsity=1.0", (15.9, 7.97, 1.53, -0.05), main=True),
    Design("3LC (s=1.50)", "threelc:sparsity=1.5", (20.9, 8.70, 1.53, -0.08)),
    Design("3LC (s=1.75)", "threelc:sparsity=1.75", (22.8, 9.04, 1.53, 0.14), main=True),
    Design("3LC (s=1.90)", "threelc:sparsity=1.9", (22.8, 9.22, 1.55, -0.27)),
)


@dataclass(frozen=True)
class Run:
    """Results of one training.

    Attributes:
        workers: What each worker recorded.
        parameters: Number of parameters of the model.
        local_steps: Number of steps that are exchanged together.
    """

    workers: list[dict[str, Any]]
    parameters: int
    local_steps: int = 1

    @property
    def step(self) -> float:
        """Median seconds per step. Steps that are exchanged together count by their mean."""
        together = range(FIRST, len(self.workers[0]["seconds"]) - self.local_steps + 1, self.local_steps)
        return statistics.median(
            statistics.fmean(worker["seconds"][at : at + self.local_steps])
            for worker in self.workers
            for at in together
        )

    def bits(self, way: str) -> list[float]:
        """Bits per parameter and step, pushed or pulled, averaged over workers."""
        steps = zip(*(worker[way] for worker in self.workers))
        return [8 * statistics.fmean(sent) / self.parameters for sent in steps]

    def ideal(self, rate_bits: float) -> float:
        """Ideal step: the larger of the step without communication and the server's bytes over the rate of its link."""
        compute = statistics.median(worker["compute"] for worker in self.workers)
        steps = len(self.workers[0]["seconds"])
        timed = slice(FIRST, steps - (steps - FIRST) % self.local_steps)  # whole exchanges
        ways = (statistics.fmean(self.bits(way)[timed]) for way in ("pushed", "pulled"))
        return max(compute, *(WORKERS * bits * self.parameters / rate_bits for bits in ways))


@dataclass(frozen=True)
class Size:
    """Size of the model: blocks per stage, and channels of the first stage."""

    blocks: int = 1
    width: int = 32

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in ResNet(self.blocks, self.width).parameters())


Training = tuple[Design, str, int, float | str]
"""Design, rate, seed, and the share of the steps; short trainings, which time a step, have none."""


def train(lab: Lab, design: Design, data: Path, size: Size, *, steps: int, seed: int, test: bool) -> Run:
    """Train once in the lab. Host 0 is the server, the others are workers."""
    with tempfile.TemporaryDirectory(prefix="gradwire-threelc-") as folder:
        server = lab.addresses[0]
        job = {
            "workers": WORKERS, "steps": steps, "seed": seed, "test": test, "data": str(data.resolve()),
            "server": f"{server}:{PORT}", "compressor": design.compressor, "feedback": design.feedback,
            "local_steps": design.local_steps, "blocks": size.blocks, "width": size.width,
        }  # fmt: skip
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))

        def command(host: int) -> list[str]:
            if host:
                return ranks.command("benchmarks.papers.threelc.worker", "work", str(path), host - 1)
            return [
                sys.executable, "-m", "gradwire.cli", "serve", "--parameters", "--workers", str(WORKERS),
                "--host", server, "--port", str(PORT), "--insecure", "--timeout", "300",
            ]  # fmt: skip

        lab.run(command, timeout=1800, env={"OMP_NUM_THREADS": "1"}).check()
        workers = [json.loads((Path(folder) / f"worker-{worker}.json").read_text()) for worker in range(WORKERS)]
    return Run(workers, size.parameters, design.local_steps)


def run(
    data: Cifar10,
    steps: Annotated[int, typer.Option(help="Steps of a whole training.")] = 200,
    seeds: Seeds = 3,
    blocks: Annotated[int, typer.Option(help="Blocks of each stage of the ResNet.")] = 1,
    width: Annotated[int, typer.Option(help="Channels of its first stage.")] = 32,
    shares: Annotated[bool, typer.Option(help="Train for 25, 50 and 75 % of the steps, too.")] = True,
    designs: Annotated[str, typer.Option(help="Labels of designs, such as '32-bit float'.")] = "",
    parts: Annotated[str, typer.Option(help="learn, hurry (short trainings that time steps), or both.")] = "",
    runs: Annotated[int, typer.Option(min=1, max=10, help="Short trainings of each design at each rate.")] = 3,
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[Row]:
    """Run all trainings that the record does not have, one after another."""
    load(data, "train")  # decoded once, before all workers would
    labels = choose(designs, [design.label for design in DESIGNS])
    chosen, kinds = [design for design in DESIGNS if design.label in labels], choose(parts, ("learn", "hurry"))
    size = Size(blocks, width)
    trainings = [
        *(learn(chosen, seeds, shares) if "learn" in kinds else ()),
        *(hurry(chosen, runs) if "hurry" in kinds else ()),
    ]
    with Lab(WORKERS + 1, FULL_RATE) as lab:
        for design, rate, seed, share in trainings:
            count = round(float(share or 0) * steps) or few(design, rate, steps)
            row = {"method": design.label, "rate": rate, "seed": seed, "share": share, "steps": count}
            if key_of({**row, "size": size.parameters}, KEY) in done:
                continue
            lab.set_rate(rate)
            found = train(lab, design, data, size, steps=count, seed=seed, test=bool(share))
            learned = f", {found.workers[0]['accuracy']:.2%} after {count} steps, seed {seed}" if share else ""
            print(f"{design.label:20} {rate:8} {1e3 * found.step:7.1f} ms per step{learned}", flush=True)
            yield from figures(design, found, rate, seed, share)


def learn(designs: Sequence[Design], seeds: int, shares: bool) -> Iterator[Training]:
    """Run whole trainings, then shorter ones with the first seed."""
    for seed in range(seeds):
        yield from ((design, FULL_RATE, seed, 1.0) for design in designs)
    for share in (0.25, 0.5, 0.75) if shares else ():
        yield from ((design, FULL_RATE, 0, share) for design in designs if design.main)


def hurry(designs: Sequence[Design], runs: int) -> Iterator[Training]:
    """Run short trainings, for step times. The number of the run is its seed, and all designs take a turn in each."""
    for seed in range(runs):
        for rate in SHORT_STEPS:
            yield from ((design, rate, seed, "") for design in designs)


def few(design: Design, rate: str, steps: int) -> int:
    """Number of steps to time. For 3LC all steps, because its zero runs change during the training."""
    return steps if "threelc" in design.compressor else SHORT_STEPS[rate]


def figures(design: Design, run: Run, rate: str, seed: int, share: float | str) -> Iterator[dict[str, Any]]:
    """Figures of one training."""
    fixed = {
        "method": design.label, "rate": rate, "ranks": WORKERS, "size": run.parameters, "dtype": "float32",
        "seed": seed, "source": "measured", "share": share, "steps": len(run.workers[0]["seconds"]),
    }  # fmt: skip
    if not share:
        ideal = run.ideal(parse_rate(rate) or math.inf)
        yield {**fixed, "metric": "step", "value": run.step, "unit": "s", "samples": len(run.workers[0]["seconds"])}
        yield {**fixed, "metric": "ideal_step", "value": ideal, "unit": "s"}
        yield {**fixed, "metric": "step_over_ideal", "value": run.step / ideal, "unit": "ratio"}
    for way in ("pushed", "pulled"):
        yield {**fixed, "metric": f"bits_{way}", "value": statistics.fmean(run.bits(way)[FIRST:]), "unit": "bit"}
    if "accuracy" in run.workers[0]:
        yield {**fixed, "metric": "accuracy", "value": run.workers[0]["accuracy"], "unit": "share"}
    if share == 1.0 and seed == 0:
        losses = [statistics.fmean(losses) for losses in zip(*(worker["losses"] for worker in run.workers))]
        curves = {"loss": losses, "bits_pushed_at": run.bits("pushed"), "bits_pulled_at": run.bits("pulled")}
        for metric, values in curves.items():
            for at in range(0, len(values) - 9, 10):
                yield {**fixed, "metric": metric, "value": statistics.fmean(values[at : at + 10]), "step": at + 10}


# -- tables and plots ----------------------------------------------------------------------------------------------


def values(rows: Sequence[Row], label: str, metric: str, rate: str, share: float | None = None) -> list[float]:
    """Values of a metric for a design, by seed: of short runs, or of runs with a share of the steps."""
    wanted = {"method": label, "metric": metric, "rate": rate, "share": share}
    return [row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())]


def table(rows: Sequence[Row]) -> str:
    """Markdown table that combines tables 1 and 2, with 95 % intervals. The paper's speed-ups are in brackets."""
    rates = ("10mbit", "100mbit", FULL_RATE)
    lines = [
        "| design | × at 10 Mb/s | × at 100 Mb/s | × at 1 Gb/s | ÷ ideal | accuracy, % | difference | bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = values(rows, DESIGNS[0].label, "accuracy", FULL_RATE, 1.0)
    for design in DESIGNS:
        found = values(rows, design.label, "accuracy", FULL_RATE, 1.0)
        timed = all(values(rows, each.label, "step", rate) for each in (DESIGNS[0], design) for rate in rates)
        if not (found and timed):
            continue
        cells = []
        for rate, paper in zip(rates, design.paper):
            floats, own = (values(rows, label, "step", rate) for label in (DESIGNS[0].label, design.label))
            cells.append(
                f"{measured([a / b for a, b in zip(floats, own)])} ({'–' if math.isnan(paper) else f'{paper:g}'})"
            )
        over = ", ".join(measured(values(rows, design.label, "step_over_ideal", rate)) for rate in rates)
        mean, _ = interval(found)
        difference, half = interval([100 * (a - b) for a, b in zip(found, base)])
        bits = (
            statistics.fmean(values(rows, design.label, f"bits_{way}", FULL_RATE, 1.0)) for way in ("pushed", "pulled")
        )
        lines.append(
            f"| {design.label} | {' | '.join(cells)} | {over} | {100 * mean:.2f} | {difference:+.2f} ± {half:.2f} | "
            f"{' + '.join(f'{each:.3f}' for each in bits)} |"
        )
    return "\n".join(lines)


def measured(found: Sequence[float]) -> str:
    """Mean of some runs, with its 95 % interval if there are several."""
    mean, half = interval(found)
    return f"{mean:.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot accuracy by time at each rate, and loss and bits by step."""
    colors = [f"C{index}" for index in range(10)] + ["#1f2933", "#9aa5b1"]
    with figure(folder / "accuracy-and-time.svg", columns=3, size=(15, 4.4), sharey=True) as axes:
        for axis, rate in zip(axes[0], ("10mbit", "100mbit", FULL_RATE)):
            for design, color in zip(DESIGNS, colors):
                step, full = (
                    values(rows, design.label, "step", rate),
                    values(rows, design.label, "loss", FULL_RATE, 1.0),
                )
                points = []
                for share in (0.25, 0.5, 0.75, 1.0):
                    found = values(rows, design.label, "accuracy", FULL_RATE, share)
                    if found and step:
                        minutes = share * 10 * len(full) * statistics.fmean(step) / 60
                        points.append((minutes, 100 * statistics.fmean(found)))
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=4, label=design.label, color=color)
            axis.set(xscale="log", xlabel=f"minutes of training at {rate_text(rate)}")
        axes[0][0].set_ylabel("test accuracy, %")
        axes[0][0].legend(fontsize=8)
    with figure(folder / "loss-and-bits.svg", columns=2, size=(11, 4.2)) as axes:
        left, right = axes[0]
        for design in DESIGNS:
            losses = values(rows, design.label, "loss", FULL_RATE, 1.0)
            if design.main and losses:
                left.plot([10 * (i + 1) for i in range(len(losses))], losses, label=design.label, linewidth=1.2)
        left.set(xlabel="step", ylabel="training loss, mean of 10 steps")
        left.legend()
        for label, color in (("3LC (s=1.00)", "#17a08a"), ("3LC (s=1.75)", "#2f6db5")):
            for way, style in (("pushed", "-"), ("pulled", "--")):
                bits = values(rows, label, f"bits_{way}_at", FULL_RATE, 1.0)
                right.plot([10 * (i + 1) for i in range(len(bits))], bits, style, color=color, label=f"{label}, {way}")
        right.set(xlabel="step", ylabel="bits a state change", ylim=(0, None))
        right.legend()
