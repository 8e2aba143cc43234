"""Figures of benchmarks: style, opening and saving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.simulate.plots import COLORS, DENSE, STYLE

__all__ = ["COLORS", "DENSE", "STYLE", "bar_places", "figure", "legend_below", "plain_numbers"]


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (8, 4.2), **options: Any
) -> Iterator[Any]:
    """Context manager for the axes of a figure, as an array of rows and columns. Saves the figure at the end.

    Args:
        path: File of the figure. Its suffix determines the format.
        rows: Rows of axes.
        columns: Columns of axes.
        size: Width and height in inches.
        **options: Further arguments of `matplotlib.pyplot.subplots`, such as `sharey`.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        drawn, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
        yield axes
        drawn.savefig(path, dpi=130)
        pyplot.close(drawn)


def bar_places(index: int, count: int, groups: int) -> list[float]:
    """Positions of the bars of one of `count` series, one for each group, if each is 0.8 / count wide."""
    return [group + (index - (count - 1) / 2) * 0.8 / count for group in range(groups)]


def plain_numbers(axis: Any, minor: bool = False) -> None:
    """Write the numbers of a logarithmic axis as they are instead of as powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    if minor:
        axis.set_minor_formatter(lambda value, _: f"{value:g}")


def legend_below(axes: Any, columns: int = 5) -> None:
    """One legend for all axes, which show the same lines."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), fontsize=8, frameon=False
    )
