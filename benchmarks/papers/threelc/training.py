"""3LC and its rivals through a parameter server, on CIFAR-10: tables 1 and 2 and figures 4 to 9 of the 3LC paper.

    python -m benchmarks.papers.threelc.training --data cifar10  # 1 hour: benchmarks/results/threelc.csv
    python -m benchmarks.papers.threelc.training --data cifar10 --out threelc-report # and the plots
    python -m benchmarks.papers.threelc.training --plot-only --out threelc-report

`--data` is a folder of CIFAR-10 as images, see `benchmarks.data.cifar`. Four workers and a server train a ResNet in the
lab, each on a host of its own. As in the paper, accuracy is measured in whole trainings at one rate, and step times at
each rate in others, which are short but for 3LC's; a rate does not change what is learnt. Trainings that the CSV holds
already are not run again, if they have as many steps and the same model.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 5. Differences: 4 workers in place of 10; a ResNet of 8 layers and
308 thousand parameters whose first convolution has a stride of 2; some hundred steps in place of 25,600; a learning
rate of 0.025 a worker in place of 0.1, with which 3LC of s = 1.75 diverges in so few steps, and which rises over the
first twentieth; the processors compute for all workers and the server.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench.records import write_figures
from gradwire.bench.statistics import interval
from gradwire.bench.table import rate_text
from gradwire.lab import Lab
from gradwire.lab.units import parse_rate

RESULTS = Path("benchmarks/results/threelc.csv")
WORKERS = 4
FULL_RATE = "1gbit"
SHORT_STEPS = {"10mbit": 10, "100mbit": 40, FULL_RATE: 60}
PORT = 7070
FIRST = 3  # steps that are not timed: kernels are loaded, connections warm up
MORE_COLUMNS = ("step", "share", "seed", "steps")


@dataclass(frozen=True)
class Design:
    """One way to exchange state changes.

    Attributes:
        label: the paper's name.
        options: of the client.
        main: whether it is part of figures 4 to 6.
        paper: speed-ups at 10 and 100 Mb/s and 1 Gb/s, and the difference in accuracy, in points, in table 1.
    """

    label: str
    options: dict[str, Any]
    paper: tuple[float, float, float, float]
    main: bool = False


def _threelc(sparsity: float) -> dict[str, Any]:
    return {"compressor": f"threelc:sparsity={sparsity}"}


DESIGNS = (
    Design("32-bit float", {"compressor": "none"}, (1, 1, 1, 0), main=True),
    Design("8-bit int", {"compressor": "int8:stochastic=false"}, (3.62, 3.47, 1.51, -0.04)),
    Design("Stoch 3-value + QE", {"compressor": "terngrad:clip=0", "feedback": False}, (12.3, 7.51, 1.53, -1.31)),
    Design("MQE 1-bit int", {"compressor": "mqe1bit"}, (14.6, 7.40, 1.30, -0.16), main=True),
    Design("25% sparsification", {"compressor": "graddrop:ratio=0.25"}, (3.25, 3.11, 1.33, 0.03)),
    Design("5% sparsification", {"compressor": "graddrop:ratio=0.05"}, (8.98, 6.62, 1.44, -0.50), main=True),
    Design("2 local steps", {"compressor": "none", "local_steps": 2}, (1.92, 1.87, 1.38, -0.34)),
    Design("3LC (no ZRE)", {"compressor": "threelc:zero_run=false"}, (math.nan,) * 4),
    Design("3LC (s=1.00)", _threelc(1.0), (15.9, 7.97, 1.53, -0.05), main=True),
    Design("3LC (s=1.50)", _threelc(1.5), (20.9, 8.70, 1.53, -0.08)),
    Design("3LC (s=1.75)", _threelc(1.75), (22.8, 9.04, 1.53, 0.14), main=True),
    Design("3LC (s=1.90)", _threelc(1.9), (22.8, 9.22, 1.55, -0.27)),
)


@dataclass(frozen=True)
class Run:
    """What the workers of one training saw.

    Attributes:
        workers: what each wrote down.
        parameters: of the model.
        local_steps: steps that are exchanged together.
    """

    workers: list[dict[str, Any]]
    parameters: int
    local_steps: int = 1

    @property
    def step(self) -> float:
        """Median seconds of a step; of the mean of as many as go together."""
        together = range(FIRST, len(self.workers[0]["seconds"]) - self.local_steps + 1, self.local_steps)
        return statistics.median(
            statistics.fmean(worker["seconds"][at : at + self.local_steps])
            for worker in self.workers
            for at in together
        )

    def bits(self, way: str) -> list[float]:
        """Bits a parameter and step, pushed or pulled, on average over workers."""
        steps = zip(*(worker[way] for worker in self.workers))
        return [8 * statistics.fmean(sent) / self.parameters for sent in steps]

    def ideal(self, rate_bits: float) -> float:
        """The larger of the step without communication and the bytes at the server over its link's rate."""
        compute = statistics.median(worker["compute"] for worker in self.workers)
        ways = (statistics.fmean(self.bits(way)[FIRST:]) for way in ("pushed", "pulled"))
        return max(compute, *(WORKERS * bits * self.parameters / rate_bits for bits in ways))


def train(lab: Lab, design: Design, arguments: argparse.Namespace, *, steps: int, seed: int, test: bool) -> Run:
    """One training in the lab: host 0 serves, the others work."""
    with tempfile.TemporaryDirectory(prefix="gradwire-threelc-") as folder:
        server = lab.addresses[0]
        job = {
            "workers": WORKERS, "steps": steps, "seed": seed, "test": test,
            "data": str(arguments.data.resolve()), "server": f"{server}:{PORT}", "options": design.options,
            "blocks": arguments.blocks, "width": arguments.width,
        }  # fmt: skip
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))

        def command(host: int) -> list[str]:
            if host:
                return [sys.executable, "-m", "benchmarks.papers.threelc.worker", str(path), str(host - 1)]
            return [
                sys.executable, "-m", "gradwire.cli", "serve", "--parameters", "--workers", str(WORKERS),
                "--host", server, "--port", str(PORT), "--insecure", "--timeout", "300",
            ]  # fmt: skip

        lab.run(command, timeout=1800, env={"OMP_NUM_THREADS": "1"}).check()
        workers = [json.loads((Path(folder) / f"worker-{worker}.json").read_text()) for worker in range(WORKERS)]
    return Run(workers, _num_parameters(arguments), design.options.get("local_steps", 1))


def _num_parameters(arguments: argparse.Namespace) -> int:
    from benchmarks.data.cifar import ResNet

    return sum(parameter.numel() for parameter in ResNet(arguments.blocks, arguments.width).parameters())


def measure(arguments: argparse.Namespace) -> None:
    """All trainings that the file of figures does not have yet, one after the other; each is written down at once."""
    designs = [design for design in DESIGNS if not arguments.designs or design.label in arguments.designs]
    rows: list[dict[str, Any]] = list(_read(arguments.csv)) if arguments.csv.exists() else []
    size = _num_parameters(arguments)
    done = {
        (row["method"], row["rate"], int(row["seed"]), row["share"], int(row["steps"]))
        for row in rows
        if int(row["size"]) == size
    }
    with Lab(WORKERS + 1, FULL_RATE) as lab:
        for trainings in (learn, hurry):
            if trainings.__name__ not in arguments.parts:
                continue
            for design, rate, seed, share in trainings(designs, arguments):
                steps = round(float(share or 0) * arguments.steps) or _few(design, rate, arguments)
                if (design.label, rate, seed, str(share), steps) in done:
                    continue
                lab.set_rate(rate)
                run = train(lab, design, arguments, steps=steps, seed=seed, test=bool(share))
                rows += figures(design, run, rate, seed, share)
                write_figures("threelc", rows, arguments.csv, more_columns=MORE_COLUMNS)
                learnt = f", {run.workers[0]['accuracy']:.2%} after {steps} steps, seed {seed}" if share else ""
                print(f"{design.label:20} {rate:8} {1e3 * run.step:7.1f} ms a step{learnt}", flush=True)


Training = tuple[Design, str, int, float | str]


def learn(designs: Sequence[Design], arguments: argparse.Namespace) -> Iterator[Training]:
    """Whole trainings: design, rate, seed, and the share of the steps. Shorter ones have the first seed."""
    for seed in range(arguments.seeds):
        yield from ((design, FULL_RATE, seed, 1.0) for design in designs)
    for share in (0.25, 0.5, 0.75):
        yield from ((design, FULL_RATE, 0, share) for design in designs if design.main and arguments.shares)


def hurry(designs: Sequence[Design], arguments: argparse.Namespace) -> Iterator[Training]:
    """Short trainings, to time a step; they have no share."""
    for rate in SHORT_STEPS:
        yield from ((design, rate, 0, "") for design in designs)


def _few(design: Design, rate: str, arguments: argparse.Namespace) -> int:
    """Steps to time: of 3LC all, because zero runs shrink and grow as training goes on."""
    return int(arguments.steps) if "threelc" in design.options["compressor"] else SHORT_STEPS[rate]


def figures(design: Design, run: Run, rate: str, seed: int, share: float | str) -> Iterator[dict[str, Any]]:
    """What one training comes to."""
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


Rows = list[dict[str, str]]


def values(rows: Rows, label: str, metric: str, rate: str, share: str = "") -> list[float]:
    """A metric of a design, by seed: of its short runs, or of those with a share of the steps."""
    wanted = {"method": label, "metric": metric, "rate": rate, "share": share}
    return [float(row["value"]) for row in rows if all(row[key] == value for key, value in wanted.items())]


def _read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Rows) -> str:
    """Tables 1 and 2 as one, in Markdown; the paper's speed-ups in brackets."""
    rates = ("10mbit", "100mbit", FULL_RATE)
    lines = [
        "| design | × at 10 Mb/s | × at 100 Mb/s | × at 1 Gb/s | ÷ ideal | accuracy, % | difference | bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = values(rows, DESIGNS[0].label, "accuracy", FULL_RATE, "1.0")
    for design in DESIGNS:
        if not (found := values(rows, design.label, "accuracy", FULL_RATE, "1.0")):
            continue
        cells = []
        for rate, paper in zip(rates, design.paper):
            steps = [statistics.fmean(values(rows, label, "step", rate)) for label in (DESIGNS[0].label, design.label)]
            cells.append(f"{steps[0] / steps[1]:.2f} ({'–' if math.isnan(paper) else f'{paper:g}'})")
        over = ", ".join(
            f"{statistics.fmean(values(rows, design.label, 'step_over_ideal', rate)):.2f}" for rate in rates
        )
        mean, _ = interval(found)
        difference, half = interval([100 * (a - b) for a, b in zip(found, base)])
        bits = (
            statistics.fmean(values(rows, design.label, f"bits_{way}", FULL_RATE, "1.0"))
            for way in ("pushed", "pulled")
        )
        lines.append(
            f"| {design.label} | {' | '.join(cells)} | {over} | {100 * mean:.2f} | {difference:+.2f} ± {half:.2f} | "
            f"{' + '.join(f'{each:.3f}' for each in bits)} |"
        )
    return "\n".join(lines)


def plot(rows: Rows, folder: Path) -> None:
    """Accuracy against time at each rate, loss over steps, and bits over steps."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained", sharey=True)
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for axis, rate in zip(axes, ("10mbit", "100mbit", FULL_RATE)):
        for design, colour in zip(DESIGNS, colours):
            points = []
            for share in ("0.25", "0.5", "0.75", "1.0"):
                found = values(rows, design.label, "accuracy", FULL_RATE, share)
                step, full = (
                    values(rows, design.label, "step", rate),
                    values(rows, design.label, "loss", FULL_RATE, "1.0"),
                )
                if found and step:
                    points.append(
                        (float(share) * 10 * len(full) * statistics.fmean(step) / 60, 100 * statistics.fmean(found))
                    )
            if points:
                axis.plot(*zip(*points), marker="o", markersize=4, label=design.label, color=colour)
        axis.set(xscale="log", xlabel=f"minutes of training at {rate_text(rate)}")
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(folder / "accuracy-and-time.svg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for design in DESIGNS:
        losses = values(rows, design.label, "loss", FULL_RATE, "1.0")
        if design.main and losses:
            left.plot([10 * (i + 1) for i in range(len(losses))], losses, label=design.label, linewidth=1.2)
    left.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    left.legend(frameon=False)
    for label, colour in (("3LC (s=1.00)", "#17a08a"), ("3LC (s=1.75)", "#2f6db5")):
        for way, style in (("pushed", "-"), ("pulled", "--")):
            bits = values(rows, label, f"bits_{way}_at", FULL_RATE, "1.0")
            right.plot([10 * (i + 1) for i in range(len(bits))], bits, style, color=colour, label=f"{label}, {way}")
    right.set(xlabel="step", ylabel="bits a state change", ylim=(0, None))
    right.legend(frameon=False)
    figure.savefig(folder / "loss-and-bits.svg")


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder or tar of CIFAR-10 as images")
    parser.add_argument("--steps", type=int, default=200, help="of a whole training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=1, help="of each stage of the ResNet")
    parser.add_argument("--width", type=int, default=32, help="channels of its first stage")
    parser.add_argument(
        "--no-shares", dest="shares", action="store_false", help="leave out 25, 50 and 75 % of the steps"
    )
    parser.add_argument("--designs", nargs="*", default=[], help="labels of designs; all unless given")
    parser.add_argument(
        "--parts", nargs="*", default=["learn", "hurry"], choices=["learn", "hurry"],
        help="whole trainings, which may share the machine, and short ones for times, which may not",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, default=RESULTS, help="trainings that it has are not run again")
    parser.add_argument("--out", type=Path, help="folder for the plots")
    parser.add_argument("--plot-only", action="store_true")
    arguments = parser.parse_args(None if argv is None else list(argv))
    if not arguments.plot_only:
        if arguments.data is None:
            parser.error("Expected --data with CIFAR-10 as images.")
        from benchmarks.data.cifar import load

        load(arguments.data, "train")  # decoded once, before all workers would
        measure(arguments)
    rows = _read(arguments.csv)
    print(table(rows))
    if arguments.out:
        plot(rows, arguments.out)
        print(f"Plots: {arguments.out.resolve()}")


if __name__ == "__main__":
    main()
