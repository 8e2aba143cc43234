"""Plots of the figures of `gradients`, like figures 9, 12, 13 and 14 of GCOMP's paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plotting import COLORS, figure, legend_below

Figure = dict[str, Any]


def _of(found: Iterable[Figure], **wanted: Any) -> list[Figure]:
    return [figure for figure in found if all(figure.get(key) == value for key, value in wanted.items())]


def _names(found: Iterable[Figure], key: str) -> list[Any]:
    return list(dict.fromkeys(figure[key] for figure in found))


def plot(found: Sequence[Figure], folder: Path) -> None:
    """Write one file for each figure."""
    pairs = list(dict.fromkeys((figure["workload"], figure["optimizer"]) for figure in _of(found, metric="rate")))
    _lines(found, pairs, "rate", "bytes over float32's", folder / "rates.png")
    _lines(found, pairs, "exponents", "bits an exponent", folder / "tables.png")
    _levels(found, pairs, folder / "levels.png")
    _escape(found, folder / "escape.png")
    _decoding(found, folder / "decoding.png")


def _lines(found: Sequence[Figure], pairs: list[tuple[str, str]], metric: str, label: str, path: Path) -> None:
    with figure(path, 1, len(pairs), (4 * len(pairs), 3.8)) as axes:
        for axis, (workload, optimizer) in zip(axes[0], pairs, strict=True):
            here = _of(found, workload=workload, optimizer=optimizer, metric=metric)
            for color, method in zip(COLORS, _names(here, "method"), strict=False):
                line = _of(here, method=method)
                steps, values = [row["step"] for row in line], [row["value"] for row in line]
                axis.plot(steps, values, color=color, label=method)
            axis.set_title(f"{workload}, {optimizer}", fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel(label)
        legend_below(axes[0][0])


def _levels(found: Sequence[Figure], pairs: list[tuple[str, str]], path: Path) -> None:
    """Means over the last half of the steps."""
    here = _of(found, metric="mantissas")
    half = max(row["step"] for row in here) / 2
    methods = _names(here, "method")
    with figure(path, 1, 1, (8, 4)) as axes:
        for number, method in enumerate(methods):
            means = [
                np.mean([row["value"] for row in _of(here, workload=workload, optimizer=optimizer, method=method)
                         if row["step"] > half])
                for workload, optimizer in pairs
            ]  # fmt: skip
            places = np.arange(len(pairs)) + (number - len(methods) / 2 + 0.5) * 0.15
            axes[0][0].bar(places, means, 0.14, color=COLORS[number], label=method)
        axes[0][0].set_xticks(range(len(pairs)), [f"{workload},\n{optimizer}" for workload, optimizer in pairs])
        axes[0][0].axhline(0.75, color="#7b8794", linestyle="dashed", linewidth=1)  # sign and mantissa as they are
        axes[0][0].set_ylabel("signs and mantissas, bytes over float32's")
        legend_below(axes[0][0])


def _escape(found: Sequence[Figure], path: Path) -> None:
    here = _of(found, metric="escape")
    workloads = _names(here, "workload")
    with figure(path, len(workloads), 4, (12, 3 * len(workloads))) as axes:
        for line, workload in zip(axes, workloads, strict=True):
            for source, axis in enumerate(line, start=1):
                for number, method in enumerate(("Huffman", "with escape")):
                    values = [
                        _of(here, workload=workload, method=method, case=f"code of S{source} on S{target}")[0]["value"]
                        for target in range(1, 5)
                    ]
                    places = np.arange(4) + 0.4 * number - 0.2
                    axis.bar(places, values, 0.38, color=COLORS[number], label=method)
                axis.set_xticks(range(4), [f"S{target}" for target in range(1, 5)])
                axis.set_title(f"{workload}, code of S{source}", fontsize=10)
            line[0].set_ylabel("bits an exponent")
        legend_below(axes[0][0])


def _decoding(found: Sequence[Figure], path: Path) -> None:
    here = _of(found, metric="decoding")
    with figure(path, 1, 1, (6.4, 4)) as axes:
        for color, method in zip(COLORS, _names(here, "method"), strict=False):
            line = sorted(_of(here, method=method), key=_bits)
            axes[0][0].plot(
                [_bits(row) for row in line], [row["value"] for row in line], "o-", color=color, label=method
            )
        axes[0][0].set_yscale("log")
        axes[0][0].set_xlabel("bits a symbol, mean")
        axes[0][0].set_ylabel("G symbols/s (logarithmic)")
        legend_below(axes[0][0])


def _bits(row: Figure) -> float:
    return float(str(row["case"]).split()[0])
