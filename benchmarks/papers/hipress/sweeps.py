"""Step time by rate, and by how much is kept: HiPress's figure 12 in this machine's lab.

Four ranks replay the recorded backward pass of the main workload at five rates, with DDP in fp32 and with its fp16
hook, onebit, topk at three ratios and minmax at three widths. This is `gradwire bench training --replay` with these
methods and rates, plus a table of the cost of more bytes, and a plot.

Source: HiPress (SOSP 2021), figure 12. Differences: five rates instead of two networks; topk instead of DGC, whose
sampled threshold makes bytes vary; minmax is what the paper calls TernGrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import Rates, Seconds, listed
from benchmarks.plotting import DENSE, bar_places, figure, plain_numbers
from gradwire.bench import methods, records
from gradwire.bench.training import TrainingOptions
from gradwire.lab.units import parse_rate

RATES = ("10mbit", "30mbit", "100mbit", "300mbit", "1gbit")
RATIOS = tuple(f"topk:ratio={ratio}" for ratio in (0.001, 0.01, 0.05))
WIDTHS = tuple(f"minmax:bits={bits}" for bits in (2, 4, 8))
METHODS = (methods.DDP_FP32, methods.DDP_FP16, "onebit", *RATIOS, *WIDTHS)
COLORS = dict(zip(METHODS, (DENSE, "#9aa5b1", "#17a08a", "#c8ddf2", "#7fb0dd", "#2f6db5", "#f6d8b5", "#eaa85c",
                             "#b3590f")))  # fmt: skip
Row = dict[str, Any]

Steps = dict[tuple[str, str], dict[str, float]]
"""By method and rate: metrics by name."""


def by_method(rows: Sequence[Row]) -> Steps:
    """Values of each metric by method and rate."""
    found: Steps = {}
    for row in rows:
        found.setdefault((row["method"], row["rate"]), {})[row["metric"]] = row["value"]
    return found


def rates_of(steps: Steps) -> list[str]:
    """All rates in ascending order."""
    return sorted({rate for _, rate in steps}, key=lambda rate: parse_rate(rate) or 0)


def kept(steps: Steps, methods_: Sequence[str], rate: str) -> list[tuple[str, float, float]]:
    """For each method: option, speed-up over DDP fp32, and the loss of speed-up relative to the first method."""
    speedups = [steps[method, rate]["speedup"] for method in methods_]
    names = [method.partition("=")[2] for method in methods_]
    return [(name, speedup, 1 - speedup / speedups[0]) for name, speedup in zip(names, speedups)]


def run(rates: Rates = "", seconds: Seconds = 5.0) -> list[Row]:
    """Run all methods at all rates."""
    return replayed("text", METHODS, listed(rates, RATES), seconds)


def replayed(workload: str, compared: Sequence[str], rates: Sequence[str], seconds: float) -> list[Row]:
    """Figures of a replayed backward pass."""
    from gradwire.cli.bench import run_with_bars, show

    result = run_with_bars(
        TrainingOptions(
            workload=workload, methods=tuple(compared), rates=tuple(rates), steps=0, timed_seconds=seconds,
            buckets_mb=(4.0, 25.0), deadline_seconds=3600.0, replay=True,
        )
    )  # fmt: skip
    show(result)
    return list(records.rows(result))


def table(rows: Sequence[Row]) -> str:
    """Table of the cost of keeping more elements, as in figure 12b."""
    lines, steps = [], by_method(rows)
    for rate in rates_of(steps):
        for group in (RATIOS, WIDTHS):
            if all((method, rate) in steps for method in group):
                first, *others = kept(steps, group, rate)
                parts = [f"{name}: {speedup:.2f}x ({-lost:+.1%})" for name, speedup, lost in others]
                parts.insert(0, f"{first[0]}: {first[1]:.2f}x")
                lines.append(f"{rate:8} {group[0].partition('=')[0]:11} {', '.join(parts)}")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Step time against rate, and speed-up by ratio and width at each rate."""
    steps = by_method(rows)
    rates = rates_of(steps)
    known = [method for method in METHODS if (method, rates[0]) in steps]
    with figure(folder / "sweeps.svg", columns=2, size=(12, 4.6)) as axes:
        left, right = axes[0]
        for method in known:
            times = [1e3 * steps[method, rate]["step"] for rate in rates]
            left.plot(range(len(rates)), times, color=COLORS[method], marker="o", label=methods.label(method))
        ideal = [1e3 * steps[known[0], rate]["step_without_communication"] for rate in rates]
        left.plot(range(len(rates)), ideal, color="#1f2933", linestyle=":", label="without communication")
        left.set(yscale="log", ylabel="ms per step (logarithmic)", xlabel="rate of each link", title="Bandwidth")
        bars = [method for method in known if method in (*RATIOS, *WIDTHS)]
        for index, method in enumerate(bars):
            places, heights = bar_places(index, len(bars), len(rates)), [steps[method, r]["speedup"] for r in rates]
            right.bar(places, heights, 0.8 / len(bars), color=COLORS[method], label=methods.label(method))
        right.axhline(1.0, color=DENSE, linewidth=1)
        right.set(
            yscale="log", ylabel="times DDP fp32 (logarithmic)", xlabel="rate of each link", title="Kept fraction"
        )
        for each in axes[0]:
            each.set_xticks(range(len(rates)), rates)
            plain_numbers(each.yaxis, minor=True)
            each.legend(fontsize=8)
