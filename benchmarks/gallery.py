"""The gallery of the documentation site, drawn from committed records.

    python -m benchmarks.gallery          # writes docs/images/gallery-NAME-light.svg and -dark.svg

One function per figure reads the rows of a record and draws them. Texts stay text in the files, in the reader's font.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy.summary import Findings
from benchmarks.catalog import RESULTS
from benchmarks.papers.threelc import epochs, training
from benchmarks.planning.never_slower import verdicts
from gradwire.bench.records import read_figures

FOLDER = Path("docs/images")
Row = dict[str, str]
RATES = {"10mbit": 1e7, "30mbit": 3e7, "100mbit": 1e8, "300mbit": 3e8, "1gbit": 1e9}


class Palette(NamedTuple):
    """Colors of a theme, on a transparent ground: text, faint lines, DDP, and the others in order."""

    ink: str
    faint: str
    dense: str
    colors: tuple[str, ...]


THEMES = {
    "light": Palette(
        "#1f2933", "#c5ccd3", "#7b8794", ("#2f6db5", "#d9822b", "#8e5ea2", "#17a08a", "#c2406b", "#6b7f1c")
    ),
    "dark": Palette(
        "#e6edf3", "#46525f", "#8b97a3", ("#5aa0f0", "#f0a050", "#b98ad0", "#3cc9b0", "#ef6f99", "#a9c23f")
    ),
}
Draw = Callable[[Any, Palette], None]
"""Draws a figure, given the axes in a row."""


class Picture(NamedTuple):
    """A figure: how many axes, its size in inches, and what draws it."""

    columns: int
    size: tuple[float, float]
    draw: Draw


def rows(name: str, **wanted: str) -> list[Row]:
    """Rows of a record whose columns have these values."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def value(name: str, **wanted: str) -> float:
    """The figure of the only such row."""
    (row,) = rows(name, **wanted)
    return float(row["value"])


def bars(axis: Any, names: list[str], values: list[float], colors: list[str], form: str) -> None:
    """Horizontal bars, each with its figure."""
    axis.barh(range(len(names)), values, color=colors, height=0.66)
    for place, each in enumerate(values):
        axis.text(each + 0.02 * max(values), place, form.format(each), va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(values))
    axis.spines[:].set_visible(False)
    axis.tick_params(left=False, bottom=False, labelbottom=False)


def logarithmic(axis: Any, ticks: list[float], names: list[str]) -> None:
    """A logarithmic horizontal axis with these ticks only."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, names)
    axis.minorticks_off()


def step_times(axes: Any, theme: Palette) -> None:
    """Replayed steps at two rates, with the ideal step as a line."""
    names = {"ddp-fp32": "DDP fp32", "ddp-fp16": "DDP fp16 hook"}
    for axis, (rate, title) in zip(axes, (("100mbit", "100 Mb/s"), ("1gbit", "1 Gb/s")), strict=True):
        steps = rows("replay-text", metric="step", rate=rate)
        ideals = {row["method"]: float(row["value"]) for row in rows("replay-text", metric="ideal_step", rate=rate)}
        methods = [row["method"] for row in steps]
        colors = [theme.dense if method in names else theme.colors[0] for method in methods]
        bars(
            axis,
            [names.get(each, each) for each in methods],
            [1e3 * float(row["value"]) for row in steps],
            colors,
            "{:.0f}",
        )
        for place, method in enumerate(methods):
            axis.plot([1e3 * ideals[method]] * 2, [place - 0.33, place + 0.33], color=theme.ink, linewidth=1.2)
        axis.set_title(f"ms per step, {title}", loc="left")


def auto_gain(axes: Any, theme: Palette) -> None:
    """How many times faster `auto` is than the better of DDP's two, by rate: medians of runs in turns."""
    found = {(each.workload, each.rate): each.ratio for each in verdicts(read_figures(RESULTS / "never-slower.csv"))}
    names = {
        "text": "few large tensors", "vision": "a small ResNet", "blocks": "454 small tensors",
        "deep": "389 small tensors",
    }  # fmt: skip
    for axis, (rate, title) in zip(
        axes, (("100mbit", "100 Mb/s"), ("1gbit", "1 Gb/s"), ("none", "unshaped")), strict=True
    ):
        bars(
            axis,
            list(names.values()) if axis is axes[0] else [""] * len(names),
            [found[name, rate] for name in names],
            [theme.colors[0]] * len(names),
            "{:.2f}",
        )
        axis.axvline(1, color=theme.dense, linewidth=1)
        axis.set_title(f"times faster, {title}", loc="left")


def losses(axes: Any, theme: Palette) -> None:
    """Validation losses of whole trainings, by step and by time."""
    found = Findings.of(read_figures(RESULTS / "time-to-accuracy.csv"), "vision")
    methods = {
        "ddp-fp32": "DDP fp32", "ddp-fp16": "DDP fp16 hook", "int8": "int8", "threelc": "threelc",
        "threelc/momentum": "threelc, momentum corr.", "thc": "thc",
    }  # fmt: skip
    colors = dict(zip(methods, (theme.dense, theme.dense, *theme.colors), strict=False))
    for method, name in methods.items():
        curve = found.curves[method][0]
        steps, values = zip(*((step, loss) for step, loss, *_ in curve), strict=True)
        style = ":" if method == "ddp-fp16" else "-"
        axes[0].plot(steps, values, style, color=colors[method], label=name, linewidth=1.3)
        seconds = [found.seconds_to(method, "100mbit", step) for step in steps]
        minutes = [each / 60 for each in seconds if each is not None]
        if minutes:  # timed, too
            axes[1].plot(minutes, values, style, color=colors[method], linewidth=1.3)
    axes[0].set_title("validation loss by step", loc="left")
    axes[1].set_title("by minutes at 100 Mb/s", loc="left")
    axes[0].legend(fontsize=9)
    for axis in axes:
        axis.set_ylim(0.8, 1.8)


def parts(axes: Any, theme: Palette) -> None:
    """What batch compression and tensor fusion gain, each by itself."""
    names = {
        "dense": "dense DDP", "all": "all", "without-batch-compression": "without batch compression",
        "without-fusion": "without fusion",
    }  # fmt: skip
    titles = {"blocks": "454 small tensors", "deep": "389 small tensors", "text": "few large tensors"}
    for axis, (workload, title) in zip(axes, titles.items(), strict=True):
        values = [
            1e3 * value("step-ablation", workload=workload, method=method, metric="step", rate="1gbit")
            for method in names
        ]
        bars(axis, list(names.values()), values, [theme.dense, *[theme.colors[0]] * 3], "{:.0f}")
        axis.set_title(f"ms, 1 Gb/s: {title}", loc="left")
        if axis is not axes[0]:
            axis.set_yticklabels([])


def rates_and_ratios(axes: Any, theme: Palette) -> None:
    """Speed-up over DDP by rate, for three ratios and three widths (HiPress's figure 12)."""
    methods = sorted({row["method"] for row in rows("sweeps", metric="step")} - {"ddp-fp32"})
    for axis, kind in zip(axes, ("topk", "minmax"), strict=True):
        for index, method in enumerate(each for each in methods if each.startswith(kind)):
            gains = [
                value("sweeps", method="ddp-fp32", metric="step", rate=rate)
                / value("sweeps", method=method, metric="step", rate=rate)
                for rate in RATES
            ]
            axis.plot(list(RATES.values()), gains, marker="o", color=theme.colors[index], label=method)
        logarithmic(axis, list(RATES.values()), ["10", "30", "100", "300", "1000 Mb/s"])
        axis.set_yscale("log")
        axis.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        axis.minorticks_off()
        axis.set_title(f"times faster than DDP fp32, {kind}", loc="left")
        axis.legend(fontsize=9)


def thc_workers(axes: Any, theme: Palette) -> None:
    """Points of training accuracy from dense, by number of workers (THC's figure 10)."""
    counts = ["4", "8", "16", "32", "64"]
    found = rows("thc-scale", metric="train_accuracy")
    tasks = list(dict.fromkeys(row["task"] for row in found))
    for axis, task in zip(axes, tasks, strict=True):
        accuracy = {
            (row["method"], row["ranks"], row["seed"]): float(row["value"]) for row in found if row["task"] == task
        }
        for index, method in enumerate(("thc", "topk", "qsgd")):
            points = [
                statistics.fmean(
                    100 * (each - accuracy["dense", ranks, seed])
                    for (name, ranks, seed), each in accuracy.items()
                    if name == method and ranks == count
                )
                for count in counts
            ]
            axis.plot([int(count) for count in counts], points, marker="o", color=theme.colors[index], label=method)
        axis.axhline(0, color=theme.dense, linewidth=1)
        logarithmic(axis, [int(count) for count in counts], [*counts[:-1], "64 workers"])
        axis.set_title(f"points from dense, {task}", loc="left")
    axes[0].legend(fontsize=9)


def thc_simulated(axes: Any, theme: Palette) -> None:
    """Simulated speed-ups over DDP fp32, by model (THC's figure 6). Hollow points are bounds."""
    methods = {
        "DDP fp16": theme.dense, "thc, co-located": theme.colors[0], "thc, Python": theme.colors[1],
        "thc, XDP on bridge": theme.colors[2], "thc, in the switch, all free": theme.colors[3],
    }  # fmt: skip
    for axis, rate in zip(axes, ("1gbit", "10gbit", "100gbit"), strict=True):
        for method, color in methods.items():
            found = rows("thc-simulated", figure="6", rate=rate, method=method)
            face = "none" if method.endswith("free") else color
            values = [float(row["over_ddp"]) for row in found]
            axis.plot(values, range(len(found)), "o", color=color, markerfacecolor=face, label=method)
            axis.set_yticks(range(len(found)), [row["model"] for row in found] if axis is axes[0] else [])
        axis.invert_yaxis()
        axis.axvline(1, color=theme.dense, linewidth=1)
        logarithmic(axis, [0.03, 0.1, 0.3, 1, 3, 10], ["0.03", "0.1", "0.3", "DDP", "3", "10"])
        axis.set_xlim(0.012, 12)
        axis.set_title(f"simulated steps/s, {rate.removesuffix('gbit')} Gb/s", loc="left")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)


def gcomp_bytes(axes: Any, theme: Palette) -> None:
    """Bytes of `lossless` and `gcomp` over those of float32, by optimizer."""
    found = rows("gcomp-payloads")
    methods = list(dict.fromkeys(row["method"] for row in found))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in found))
    for index, method in enumerate(methods):
        values = [value("gcomp-payloads", method=method, optimizer=optimizer) for optimizer in optimizers]
        places = [group + 0.2 * (index - 1.5) for group in range(len(optimizers))]
        color = theme.dense if method == "lossless" else theme.colors[index - 1]
        axes[0].bar(places, values, 0.18, color=color, label=method)
        for place, each in zip(places, values, strict=True):
            axes[0].text(place, each + 0.01, f"{each:.2f}", ha="center", fontsize=8)
    axes[0].set_xticks(range(len(optimizers)), optimizers)
    axes[0].set_ylim(0, 1.1)
    axes[0].set_title("bytes over those of float32", loc="left")
    axes[0].legend(fontsize=9, ncols=4, loc="upper left")


def threelc_accuracy(axes: Any, theme: Palette) -> None:
    """Accuracy of the designs that 3LC compares, by bits and by time, over trainings of 20 epochs."""
    found, timed = read_figures(RESULTS / "threelc-epochs.csv"), read_figures(RESULTS / "threelc.csv")
    bits, times = axes
    for design in sorted(each.label for each in epochs.DESIGNS):
        sent = sum(epochs.mean_bits(found, design, way) for way in ("pushed", "pulled"))
        accuracies = [100 * each for each in epochs.values(found, design).values()]
        ours, middle = design.startswith("3LC"), statistics.fmean(accuracies)
        color = theme.colors[0] if ours else theme.dense
        bits.vlines(sent, min(accuracies), max(accuracies), color=color)
        bits.plot(sent, middle, "o", color=color, markersize=5)
        place, side = ((-6, -3), "right") if ours else ((6, -9 if design.startswith("5%") else -1), "left")
        bits.annotate(design, (sent, middle), place, textcoords="offset points", fontsize=8, ha=side)
    logarithmic(bits, [1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64 bits"])
    bits.set_xlim(0.2, 250)
    bits.set_title("test accuracy in %, by bits per parameter", loc="left")
    shown = ("32-bit float", "8-bit int", "MQE 1-bit int", "3LC (s=1.00)")
    for design, color in zip(shown, (theme.dense, *theme.colors[1:3], theme.colors[0])):
        minutes = statistics.fmean(training.values(timed, design, "step", "10mbit")) / 60
        course = epochs.course(found, design, "accuracy_at")
        times.plot(*zip(*((minutes * step, 100 * each) for step, each in course)), color=color, label=design)
    logarithmic(times, [1, 10, 100, 1000], ["1", "10", "100", "1,000 minutes"])
    times.legend(fontsize=8, loc="lower right")
    times.set_title("accuracy by time at 10 Mb/s", loc="left")


def balanced_sums(axes: Any, theme: Palette) -> None:
    """Bytes and simulated time of sparse sums, by number of ranks (ZEN)."""
    counts = ["16", "32", "64", "128"]
    for axis, (column, scale, title) in zip(
        axes, (("sent_bytes", 1e-6, "MB that a rank sends"), ("seconds", 1e3, "ms, simulated at 1 Gb/s")), strict=True
    ):
        for index, way in enumerate(("allgather", "sparse_reduce")):
            for positions, style in (("uniform", "-"), ("zipf", "--")):
                values = []
                for count in counts:
                    (row,) = rows("zen", part="simulated", ranks=count, positions=positions, way=way)
                    values.append(scale * float(row[column]))
                axis.plot(range(4), values, style, marker="o", color=theme.colors[index], label=f"{way}, {positions}")
        axis.set_xticks(range(4), [*counts[:-1], "128 ranks"])
        axis.set_title(title, loc="left")
    axes[0].legend(fontsize=9)


def kernels(axes: Any, theme: Palette) -> None:
    """Kernels on one core, as a fraction of the speed of a copy of the same memory."""
    found = [row for row in rows("kernels", metric="fraction_of_copy") if " of 4" not in row["method"]]
    shown = {}
    for row in found:
        shown.setdefault(row["method"], float(row["value"]))
    names = [
        "cast to bf16", "abs_max", "pack_bits 1", "unpack_bits 1", "pack_ternary", "unpack_ternary",
        "quantize_int8 nearest", "quantize_int8 stochastic", "dequantize_int8", "thc hadamard 1024",
    ]  # fmt: skip
    bars(
        axes[0],
        names,
        [shown[name] for name in names],
        [theme.colors[0] if shown[name] >= 0.8 else theme.colors[1] for name in names],
        "{:.2f}",
    )
    axes[0].axvline(1, color=theme.dense, linewidth=1)
    axes[0].set_title("speed over that of a copy (target: 0.8)", loc="left")


PICTURES = {
    "step-times": Picture(2, (9, 3.4), step_times),
    "auto": Picture(3, (9, 2.2), auto_gain),
    "losses": Picture(2, (9, 3.6), losses),
    "parts": Picture(3, (9, 2.2), parts),
    "rates": Picture(2, (9, 3.4), rates_and_ratios),
    "thc-workers": Picture(2, (9, 3.2), thc_workers),
    "thc-simulated": Picture(3, (9, 3.4), thc_simulated),
    "gcomp-bytes": Picture(1, (9, 3.2), gcomp_bytes),
    "threelc": Picture(2, (9, 3.8), threelc_accuracy),
    "balanced-sums": Picture(2, (9, 3.2), balanced_sums),
    "kernels": Picture(1, (9, 3.4), kernels),
}


def draw(name: str, theme: str, folder: Path = FOLDER) -> Path:
    """Draw a picture in a theme. Returns its file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    palette, picture = THEMES[theme], PICTURES[name]
    path = folder / f"gallery-{name}-{theme}.svg"
    inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    style = {
        **dict.fromkeys(inks, palette.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), palette.faint),
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "axes.titlesize": 10, "legend.frameon": False,
        "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
        "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    }  # fmt: skip
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(1, picture.columns, figsize=picture.size, squeeze=False, layout="constrained")
        picture.draw(axes[0], palette)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main() -> None:
    """Draw all pictures in both themes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        for theme in THEMES:
            print(draw(name, theme))


if __name__ == "__main__":
    main()
