"""Plots of step time and scaling efficiency against ranks and bandwidth; the style of all plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradwire.core.errors import OptionError
from gradwire.simulate.sweep import SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
# The dense method is gray; the others have colors that can be told apart without red and green.
DENSE = "#3e4c59"
COLORS = ("#2f6db5", "#d9822b", "#8e5ea2", "#17a08a", "#c2406b", "#6b7f1c", "#5b4bc4", "#8a5a2b")
_DASHES = (("-", "solid"), ("--", "dashed"))
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}

Axis = tuple[str, Callable[[SweepRow], float], Callable[[float], str]]


def check_format(path: Path) -> None:
    """Refuse a plot in an unknown format.

    Raises:
        OptionError: The suffix of the file is not that of a known format.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise OptionError(f"{path} has no suffix of a known image format. End it in .{', .'.join(sorted(known))}.")


def write_plot(rows: Sequence[SweepRow], path: str | Path, title: str = "") -> None:
    """Plot the rows of a sweep: one column against ranks and one against bandwidth, if each varies.

    Args:
        rows: Rows of one model.
        path: Image file. Its suffix names the format.
        title: Title of the figure.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = _columns(rows)
    with mpl.rc_context(cast(Any, STYLE)):
        size = (max(6.4, 5.4 * len(columns)), 7.4)
        figure, grid = plt.subplots(2, len(columns), figsize=size, squeeze=False, layout="constrained", sharex="col")
        for (upper, lower), (along, others) in zip(grid.T, columns, strict=True):
            _draw(upper, rows, along, others, lambda row: 1e3 * row.step_seconds)
            _draw(lower, rows, along, others, lambda row: 100 * row.efficiency)
            _scale(upper, rows)
            lower.set_xlabel(along[0])
            lower.set_ylim(0, 105)
        grid[0][0].set_ylabel("step, ms (logarithmic)")
        grid[1][0].set_ylabel("scaling efficiency, %")
        lines = {line.get_label(): line for line in grid[0][0].get_lines() if not str(line.get_label()).startswith("_")}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(4, len(lines)), fontsize=9)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def _columns(rows: Sequence[SweepRow]) -> list[tuple[Axis, Axis]]:
    """Axis of each column, and what distinguishes lines of one color."""
    ranks: Axis = ("ranks (logarithmic)", lambda row: row.ranks, lambda value: f"{value:g} ranks")
    rates: Axis = ("link, Gbit/s (logarithmic)", _gigabits, lambda value: f"{value:g} Gbit/s")
    found = []
    if len({row.ranks for row in rows}) > 1 or len({row.rate_bits for row in rows}) == 1:
        found.append((ranks, rates))
    if len({row.rate_bits for row in rows}) > 1:
        found.append((rates, ranks))
    return found


def _gigabits(row: SweepRow) -> float:
    return (row.rate_bits or 0.0) / 1e9


def _draw(axes: Axes, rows: Sequence[SweepRow], along: Axis, others: Axis, value: Callable[[SweepRow], float]) -> None:
    apart = _ends(sorted({others[1](row) for row in rows}))
    for label, color in _colors(rows).items():
        mine = [row for row in rows if row.label == label]
        for (dash, _), other in zip(_DASHES, apart):
            xs, ys = zip(*sorted((along[1](row), value(row)) for row in mine if others[1](row) == other), strict=True)
            name = label if other == apart[0] else None
            axes.plot(xs, ys, dash, marker="o", markersize=3.5, color=color, label=name, linewidth=1.6)
    axes.set_xscale("log")
    ticks = sorted({along[1](row) for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    drawn = ", ".join(f"{name} {others[2](other)}" for (_, name), other in zip(_DASHES, apart))
    axes.set_title(drawn if len(apart) > 1 else others[2](apart[0]), fontsize=9.5, color=FAINT)


def _colors(rows: Sequence[SweepRow]) -> dict[str, str]:
    """One color per method, the same in all plots."""
    dense = next((row.label for row in rows if row.method == "none"), None)
    others = [label for label in dict.fromkeys(row.label for row in rows) if label != dense]
    found = {label: COLORS[index % len(COLORS)] for index, label in enumerate(others)}
    return found if dense is None else {dense: DENSE, **found}


def _ends(values: list[float]) -> list[float]:
    """The first and the last value: more lines of one color cannot be told apart."""
    return values if len(values) <= len(_DASHES) else [values[0], values[-1]]


def _scale(axes: Axes, rows: Sequence[SweepRow]) -> None:
    """Use a logarithmic axis with plain numbers, and draw the step without communication as a line."""
    steps = [1e3 * row.step_seconds for row in rows]
    axes.set_yscale("log")
    axes.set_ylim(0.8e3 * rows[0].compute_seconds, 1.25 * max(steps))
    axes.yaxis.set_major_locator(_locator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    dots = (0, (1, 2))
    axes.axhline(
        1e3 * rows[0].compute_seconds, color=FAINT, linewidth=1.2, linestyle=dots, label="without communication"
    )


def _locator() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1.0, 2.0, 5.0))
