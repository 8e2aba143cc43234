"""The picture of the README, drawn from `benchmarks/results/time-to-accuracy.csv`.

    python -m benchmarks.readme_picture          # writes docs/images/results-light.svg and results-dark.svg

One model, one row per method: minutes until its validation loss reaches that of DDP fp32, and the time of a step on a
slow and on a fast link. A method that does not reach the loss has no bar there, but a note.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.summary import Findings
from benchmarks.catalog import RESULTS
from gradwire.bench.methods import DDP_FP16, DDP_FP32
from gradwire.bench.records import read_figures
from gradwire.bench.table import rate_text

FOLDER = Path("docs/images")
WORKLOAD, SLOW, FAST = "vision", "100mbit", "1gbit"
METHODS = {
    DDP_FP32: "DDP fp32",
    DDP_FP16: "DDP fp16 hook",
    "int8": "int8",
    "thc": "thc",
    "threelc/momentum": "threelc, momentum corr.",
    "onebit/momentum": "onebit, momentum corr.",
    "topk:ratio=0.01/momentum": "topk 1 %, momentum corr.",
    "powersgd": "powersgd",
    "auto": "auto",
    "auto/momentum": "auto, momentum corr.",
}
BASELINES = (DDP_FP32, DDP_FP16)


@dataclass(frozen=True)
class Theme:
    """Colors on a transparent ground."""

    ink: str
    faint: str
    baseline: str
    ours: str


THEMES = {
    "light": Theme(ink="#1f2933", faint="#66727f", baseline="#9aa5b1", ours="#2f6db5"),
    "dark": Theme(ink="#e6edf3", faint="#9aa7b4", baseline="#6b7785", ours="#5aa0f0"),
}


@dataclass(frozen=True)
class Bar:
    """What the picture says about one method.

    Attributes:
        name: Display name.
        ours: Whether it is a method of gradwire.
        minutes: Minutes at the slow rate until the goal, the mean over seeds; None if a seed does not reach it.
        above: Loss at the end, relative to DDP fp32 with the same seeds, as a fraction.
        num_there: Number of trainings that reach the goal.
        num_seeds: Number of trainings.
        slow: Milliseconds of a step at the slow rate.
        fast: Milliseconds of a step at the fast rate.
    """

    name: str
    ours: bool
    minutes: float | None
    above: float
    num_there: int
    num_seeds: int
    slow: float
    fast: float


def bars(path: Path = RESULTS / "time-to-accuracy.csv") -> Iterator[Bar]:
    """The methods of the record whose steps were timed and that were trained."""
    found = Findings.of(read_figures(path), WORKLOAD)
    for method, name in METHODS.items():
        slow, fast = (found.seconds_of(method, rate, found.steps) for rate in (SLOW, FAST))
        curves = found.curves_at(method, SLOW)
        if slow is None or fast is None or not curves:
            continue
        seconds = list(found.seconds_to_goal(method, SLOW).values())
        reached = [each for each in seconds if each is not None]
        above = statistics.fmean(
            curve[-1][1] / found.curves[DDP_FP32][seed][-1][1] - 1 for seed, curve in curves.items()
        )
        yield Bar(
            name,
            method not in BASELINES,
            statistics.fmean(reached) / 60 if len(reached) == len(seconds) else None,
            above,
            len(reached),
            len(curves),
            1e3 * slow / found.steps,
            1e3 * fast / found.steps,
        )


def draw(rows: list[Bar], theme: Theme, path: Path) -> None:
    """Draw the picture in one theme."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    style = {"svg.hashsalt": path.stem, "font.size": 10, "text.color": theme.ink, "axes.titlecolor": theme.ink}
    panels = (
        (f"min to DDP's loss, {rate_text(SLOW)}", [row.minutes for row in rows], "{:.1f}"),
        (f"ms per step, {rate_text(SLOW)}", [row.slow for row in rows], "{:.0f}"),
        (f"ms per step, {rate_text(FAST)}", [row.fast for row in rows], "{:.0f}"),
    )
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(1, 3, figsize=(9.2, 0.9 + 0.32 * len(rows)), sharey=True, layout="constrained")
        for panel, (title, values, form) in zip(axes, panels, strict=True):
            _panel(panel, rows, theme, values, form)
            panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axes[0].set_yticks(range(len(rows)), [row.name for row in rows], color=theme.ink)
        axes[0].invert_yaxis()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _panel(panel: Any, rows: list[Bar], theme: Theme, values: list[float | None], form: str) -> None:
    colors = [theme.ours if row.ours else theme.baseline for row in rows]
    longest = max(value for value in values if value is not None)
    panel.barh(range(len(rows)), [value or 0.0 for value in values], color=colors, height=0.66)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        note = f"{row.num_there} of {row.num_seeds} seeds: {100 * row.above:+.1f} %"
        text = form.format(value) if value is not None else note
        color = theme.ink if value is not None else theme.faint
        panel.text((value or 0.0) + 0.02 * longest, place, text, va="center", color=color, fontsize=9)
    panel.set_xlim(0, 1.22 * longest)
    panel.spines[:].set_visible(False)
    panel.tick_params(left=False, bottom=False, labelbottom=False)


def main() -> None:
    """Write the picture in both themes."""
    rows = list(bars())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, theme in THEMES.items():
        draw(rows, theme, FOLDER / f"results-{name}.svg")


if __name__ == "__main__":
    main()
