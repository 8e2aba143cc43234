"""Plots of the report as inline SVG, without links or fonts."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from gradwire.bench import methods
from gradwire.bench.table import megabytes, rate_text, short_label, times
from gradwire.simulate.plots import COLORS, DENSE, FAINT, INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradwire.bench.results import MethodResult, TrainingResult

# DDP in gray, gradwire's methods in colors that can be distinguished without red and green.
_NATIVE = {methods.DDP_FP32: DENSE, methods.DDP_FP16: "#9aa5b1"}
SPLIT = {"compute": "#cbd2d9", "encode": "#d9822b", "wire": "#2f6db5", "decode": "#17a08a"}
_SMOOTHING = 0.8  # of loss curves, which are losses of single batches

_STYLE: dict[str, Any] = {**STYLE, "svg.fonttype": "none"}


def colors(result: TrainingResult) -> dict[str, str]:
    """The color of each method in all plots."""
    ours = [entry.method for entry in result.results if entry.method not in _NATIVE]
    return _NATIVE | {method: COLORS[index % len(COLORS)] for index, method in enumerate(ours)}


def loss_by_step(result: TrainingResult) -> str:
    """Training loss by step."""

    def draw(axes: Axes) -> None:
        for entry, color in _curves(result):
            axes.plot(range(1, len(entry.losses) + 1), smooth(entry.losses), color=color, label=entry.label)
        axes.set_xlabel("step")
        _label_losses(axes, result)
        axes.legend(fontsize=9, labelcolor=INK)

    return _figure("loss by step", draw)


def loss_by_time(result: TrainingResult, index: int) -> str:
    """Training loss by time: steps times the median step time."""

    def draw(axes: Axes) -> None:
        for entry, color in _curves(result):
            step = entry.times[index].step.median
            seconds = [step * number for number in range(1, len(entry.losses) + 1)]
            axes.plot(seconds, smooth(entry.losses), color=color, label=entry.label)
        _logarithmic(axes)
        axes.set_xlabel(f"seconds at {rate_text(result.rates[index])} (logarithmic)")
        _label_losses(axes, result)

    return _figure("loss by time", draw)


def bytes_by_method(result: TrainingResult, index: int) -> str:
    """Bytes that each rank sends per step."""

    def draw(axes: Axes) -> None:
        values = [entry.times[index].bytes / 1e6 for entry in result.results]
        _bars(axes, result, values)
        for place, entry in enumerate(result.results):
            time = entry.times[index]
            text = f" {megabytes(time.bytes)} MB" + (f"  ({times(time.ratio)})" if time.ratio > 1.01 else "")
            axes.text(time.bytes / 1e6, place, text, va="center", fontsize=9)
        axes.set_xlim(min(values) / 2, max(values) * 6)
        axes.set_xlabel("MB sent per rank and step (logarithmic)")
        _rows(axes)

    return _figure("bytes", draw, height=_height(result))


def step_against_ideal(result: TrainingResult, index: int) -> str:
    """Step times with percentiles, and the ideal step as a mark."""

    def draw(axes: Axes) -> None:
        steps = [entry.times[index] for entry in result.results]
        values = [1e3 * time.step.median for time in steps]
        low = [1e3 * max(0.0, time.step.median - time.step.p20) for time in steps]
        high = [1e3 * max(0.0, time.step.p80 - time.step.median) for time in steps]
        _bars(axes, result, values, xerr=[low, high], error_kw={"ecolor": FAINT, "elinewidth": 1.2})
        places = range(len(steps))
        axes.vlines(
            [1e3 * time.ideal for time in steps],
            [place - 0.42 for place in places],
            [place + 0.42 for place in places],
            color=INK,
            linewidth=2.2,
            label="ideal step",
        )
        for place, time in enumerate(steps):
            axes.text(
                1e3 * time.step.p80,
                place,
                f"  {1e3 * time.step.median:,.0f} ms = {time.over_ideal:.2f} × ideal",
                va="center",
                fontsize=9,
            )
        axes.set_xlim(0.5 * 1e3 * min(time.ideal for time in steps), 8 * max(values))
        axes.set_xlabel("ms per step (logarithmic); black: the ideal step")
        _rows(axes)

    return _figure("step and ideal", draw, height=_height(result))


def time_split(result: TrainingResult, index: int) -> str:
    """Shares of a step's time."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(result.results)
        for part, color in SPLIT.items():
            shares = [
                100 * getattr(entry.times[index].split, part) / entry.times[index].step.median
                for entry in result.results
            ]
            axes.barh(_labels(result), shares, left=left, color=color, label=part, height=0.62)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the step")
        axes.legend(ncol=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9, labelcolor=INK)
        _rows(axes)

    return _figure("split", draw, height=_height(result) + 0.3)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, weight, smoothed = 0.0, 0.0, []
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed


def to_inline(svg: str) -> str:
    """An SVG document as an HTML element, without prologue, metadata and namespaces."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    # The page determines the width, not the drawing.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def _figure(name: str, draw: Callable[[Axes], None], height: float = 3.6) -> str:
    with _styled(name) as pyplot:
        figure, axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")
        try:
            draw(axes)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True)
        finally:
            pyplot.close(figure)
    return to_inline(buffer.getvalue())


@contextmanager
def _styled(name: str) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # The salt keeps ids different between the plots of a page.
    with pyplot.rc_context(cast(Any, _STYLE) | {"svg.hashsalt": name}):
        yield pyplot


def _curves(result: TrainingResult) -> list[tuple[MethodResult, str]]:
    known = colors(result)
    return [(entry, known[entry.method]) for entry in result.results if entry.losses]


def _label_losses(axes: Axes, result: TrainingResult) -> None:
    axes.set_ylabel("training loss (nats, smoothed)")
    curves = [smooth(entry.losses) for entry in result.results if entry.losses]
    if curves:
        # A method that diverges leaves the frame, so that the others stay legible.
        lowest, first = min(min(curve) for curve in curves), max(curve[0] for curve in curves)
        axes.set_ylim(0.97 * lowest, 1.05 * first)


def _labels(result: TrainingResult) -> list[str]:
    return [short_label(entry) for entry in result.results]


def _bars(axes: Axes, result: TrainingResult, values: Sequence[float], **options: Any) -> None:
    """Draw a bar for each method on a logarithmic scale."""
    known = colors(result)
    color = [known[entry.method] for entry in result.results]
    axes.barh(_labels(result), values, color=color, height=0.62, **options)
    _logarithmic(axes)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _rows(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _height(result: TrainingResult) -> float:
    return 1.0 + 0.36 * len(result.results)
