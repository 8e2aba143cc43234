"""Speed-up by compression ratio of sparsifiers and QSGD: DRAGONN's figure 8 in this machine's lab.

Four ranks replay the recorded backward pass of a workload with dragonn and dgc at four ratios and with qsgd at three
widths, at two rates. The ratio in the plot is that of bytes, with positions and headers.

Source: DRAGONN (Wang et al. 2022), section 5.3, figure 8. Differences: the main workload, wide residual layers, instead
of ViT and MLP-Mixer; 4 ranks on slower links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Rates, Seconds, listed
from benchmarks.papers.hipress.sweeps import by_method, replayed
from benchmarks.plotting import DENSE, figure
from gradwire.bench import methods

RATES = ("100mbit", "1gbit")
RATIOS = (0.0001, 0.001, 0.01, 0.1)
FAMILIES = {
    "dragonn": tuple(f"dragonn:ratio={ratio}" for ratio in RATIOS),
    "dgc": tuple(f"dgc:ratio={ratio}" for ratio in RATIOS),
    "qsgd": tuple(f"qsgd:bits={bits}" for bits in (2, 4, 8)),
}
METHODS = (methods.DDP_FP32, *(method for family in FAMILIES.values() for method in family))
COLORS = dict(zip(FAMILIES, ("#17a08a", "#b3590f", "#2f6db5")))


@dataclass(frozen=True)
class Point:
    """One method at one rate.

    Attributes:
        fraction: Fraction of the dense bytes.
        speedup: Speed-up over DDP fp32.
        over_ideal: Step over ideal step.
    """

    fraction: float
    speedup: float
    over_ideal: float


Points = dict[tuple[str, str], Point]
"""By method and rate."""
Row = dict[str, Any]


def points_of(rows: Sequence[Row]) -> Points:
    """Points of the plot, for each method and rate."""
    return {
        key: Point(1 / metrics["compression_ratio"], metrics["speedup"], metrics["step_over_ideal"])
        for key, metrics in by_method(rows).items()
        if "compression_ratio" in metrics
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown table of speed-ups, one row for each method."""
    points = points_of(rows)
    rates = list(dict.fromkeys(rate for _, rate in points))
    lines = [f"| | of the dense bytes | {' | '.join(f'{rate}: ×, ÷ ideal' for rate in rates)} |"]
    lines.append("|---|---|" + "---|" * len(rates))
    for method in dict.fromkeys(method for method, _ in points):
        cells = [f"{points[method, rate].speedup:.2f}, {points[method, rate].over_ideal:.2f}" for rate in rates]
        lines.append(f"| `{method}` | {points[method, rates[0]].fraction:.3%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot speed-up against the fraction of bytes, with one plot for each rate."""
    points = points_of(rows)
    rates = list(dict.fromkeys(rate for _, rate in points))
    with figure(folder / "sparse-ratios.svg", columns=len(rates), size=(5.5 * len(rates), 4.2)) as axes:
        for axis, rate in zip(axes[0], rates):
            for family, members in FAMILIES.items():
                mine = [points[method, rate] for method in members if (method, rate) in points]
                if mine:
                    xy = sorted((point.fraction, point.speedup) for point in mine)
                    axis.plot(*zip(*xy), marker="o", color=COLORS[family], label=family)
            axis.axhline(1.0, color=DENSE, linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel="bytes, as a fraction of dense ones", title=rate)
            axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
            axis.set_yticks([], minor=True)
        axes[0][0].set_ylabel("times DDP fp32 (logarithmic)")
        axes[0][0].legend()


def run(
    workload: Annotated[str, typer.Option(help="text, deep, or CLASS=FOLDER.")] = "text",
    rates: Rates = "",
    seconds: Seconds = 3.0,
) -> list[Row]:
    """Run all methods at all rates."""
    return replayed(workload, METHODS, listed(rates, RATES), seconds)
