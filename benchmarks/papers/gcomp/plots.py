"""Plots of the GCOMP studies, in the shapes of the paper's figures 9, 12, 13, 14, 18 and 19."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.simulate.plots import _COLOURS, _STYLE

Figure = dict[str, Any]


@contextmanager
def figure_axes(rows: int, columns: int, size: tuple[float, float], path: Path) -> Iterator[Any]:
    """Axes of a figure that is written to `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        yield axes
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _legend_below(axes: Any) -> None:
    """One legend for all axes, which show the same lines."""
    handles, labels = axes[0][0].get_legend_handles_labels()
    axes[0][0].figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=8)


def _of(found: Iterable[Figure], **wanted: Any) -> list[Figure]:
    return [figure for figure in found if all(figure.get(key) == value for key, value in wanted.items())]


def _names(found: Iterable[Figure], key: str) -> list[Any]:
    return list(dict.fromkeys(figure[key] for figure in found))


# -- gradients -----------------------------------------------------------------------------------------------------


def plot_gradients(found: Sequence[Figure], folder: Path) -> Path:
    """What `benchmarks.papers.gcomp.gradients` found, a file a figure."""
    pairs = list(dict.fromkeys((figure["workload"], figure["optimizer"]) for figure in _of(found, metric="rate")))
    _lines(found, pairs, "rate", "bytes over float32's", folder / "rates.png")
    _lines(found, pairs, "exponents", "bits an exponent", folder / "tables.png")
    _levels(found, pairs, folder / "levels.png")
    _escape(found, folder / "escape.png")
    _decoding(found, folder / "decoding.png")
    return folder


def _lines(found: Sequence[Figure], pairs: list[tuple[str, str]], metric: str, label: str, path: Path) -> None:
    with figure_axes(1, len(pairs), (4 * len(pairs), 3.8), path) as axes:
        for axis, (workload, optimizer) in zip(axes[0], pairs, strict=True):
            here = _of(found, workload=workload, optimizer=optimizer, metric=metric)
            for colour, method in zip(_COLOURS, _names(here, "method"), strict=False):
                line = _of(here, method=method)
                steps, values = [row["step"] for row in line], [row["value"] for row in line]
                axis.plot(steps, values, color=colour, label=method)
            axis.set_title(f"{workload}, {optimizer}", fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel(label)
        _legend_below(axes)


def _levels(found: Sequence[Figure], pairs: list[tuple[str, str]], path: Path) -> None:
    """Means over the last half of the steps."""
    here = _of(found, metric="mantissas")
    half = max(row["step"] for row in here) / 2
    methods = _names(here, "method")
    with figure_axes(1, 1, (8, 4), path) as axes:
        for number, method in enumerate(methods):
            means = [
                np.mean([row["value"] for row in _of(here, workload=workload, optimizer=optimizer, method=method)
                         if row["step"] > half])
                for workload, optimizer in pairs
            ]  # fmt: skip
            places = np.arange(len(pairs)) + (number - len(methods) / 2 + 0.5) * 0.15
            axes[0][0].bar(places, means, 0.14, color=_COLOURS[number], label=method)
        axes[0][0].set_xticks(range(len(pairs)), [f"{workload},\n{optimizer}" for workload, optimizer in pairs])
        axes[0][0].axhline(0.75, color="#7b8794", linestyle="dashed", linewidth=1)  # sign and mantissa as they are
        axes[0][0].set_ylabel("signs and mantissas, bytes over float32's")
        _legend_below(axes)


def _escape(found: Sequence[Figure], path: Path) -> None:
    here = _of(found, metric="escape")
    workloads = _names(here, "workload")
    with figure_axes(len(workloads), 4, (12, 3 * len(workloads)), path) as axes:
        for line, workload in zip(axes, workloads, strict=True):
            for source, axis in enumerate(line, start=1):
                for number, method in enumerate(("Huffman", "with escape")):
                    values = [
                        _of(here, workload=workload, method=method, case=f"code of S{source} on S{target}")[0]["value"]
                        for target in range(1, 5)
                    ]
                    places = np.arange(4) + 0.4 * number - 0.2
                    axis.bar(places, values, 0.38, color=_COLOURS[number], label=method)
                axis.set_xticks(range(4), [f"S{target}" for target in range(1, 5)])
                axis.set_title(f"{workload}, code of S{source}", fontsize=10)
            line[0].set_ylabel("bits an exponent")
        _legend_below(axes)


def _decoding(found: Sequence[Figure], path: Path) -> None:
    here = _of(found, metric="decoding")
    with figure_axes(1, 1, (6.4, 4), path) as axes:
        for colour, method in zip(_COLOURS, _names(here, "method"), strict=False):
            line = sorted(_of(here, method=method), key=_bits)
            axes[0][0].plot(
                [_bits(row) for row in line], [row["value"] for row in line], "o-", color=colour, label=method
            )
        axes[0][0].set_yscale("log")
        axes[0][0].set_xlabel("bits a symbol, mean")
        axes[0][0].set_ylabel("G symbols/s (logarithmic)")
        _legend_below(axes)


def _bits(row: Figure) -> float:
    return float(str(row["case"]).split()[0])


# -- losses --------------------------------------------------------------------------------------------------------


def plot_losses(found: Sequence[Figure], folder: Path) -> Path:
    """What `benchmarks.papers.gcomp.loss` found: boxes of deviations above, curves of the first seed below."""
    from benchmarks.papers.gcomp.loss import deviations

    off = deviations(list(found))
    pairs = list(dict.fromkeys(key[:2] for key in off))
    methods = list(dict.fromkeys(key[2] for key in off))
    with figure_axes(2, len(pairs), (4.2 * len(pairs), 7), folder / "losses.png") as axes:
        for upper, lower, (workload, optimizer) in zip(*axes, pairs, strict=True):
            boxes = [off[workload, optimizer, method] for method in methods]
            upper.boxplot(
                boxes, whis=(1, 99), showfliers=False, tick_labels=[name.replace(" ", "\n", 1) for name in methods]
            )
            upper.set_yscale("symlog", linthresh=1e-4)
            upper.set_title(f"{workload}, {optimizer}", fontsize=10)
            curves = _of(found, workload=workload, optimizer=optimizer, seed=0)
            for colour, method in zip(("#3e4c59", *_COLOURS), _names(curves, "method"), strict=False):
                values = np.array([row["value"] for row in _of(curves, method=method)])
                smooth = np.convolve(values, np.ones(10) / 10, "valid")
                lower.plot(np.arange(smooth.size) + 10, smooth, color=colour, label=method, linewidth=1.2)
            lower.set_xlabel("step")
        axes[0][0].set_ylabel("loss minus that of exact sums, nat")
        axes[1][0].set_ylabel("training loss, mean of 10 steps, nat")
        handles, labels = axes[1][0].get_legend_handles_labels()
        axes[1][0].figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    return folder
