"""Results as tables for the terminal, and formatting of numbers for readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.bench import methods
from gradwire.bench.results import MethodResult, StepTime, TrainingResult
from gradwire.bench.statistics import relative_difference
from gradwire.lab.units import format_rate, parse_rate

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.bench.measure import KernelTiming

LOSS_TOLERANCE = 0.03
"""A validation loss up to this fraction above that of DDP fp32 counts as equal."""

_UNITS = {"gbit": "Gb/s", "mbit": "Mb/s", "kbit": "kb/s", "bit": "b/s"}


def rate_text(rate: str | None) -> str:
    """A rate for readers: `100 Mb/s`."""
    text = format_rate(parse_rate(rate))
    for unit, written in _UNITS.items():
        if text.endswith(unit):
            return f"{text.removesuffix(unit)} {written}"
    return "unshaped"


def milliseconds(seconds: float) -> str:
    """Milliseconds with about three digits."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def megabytes(num_bytes: float | None) -> str:
    """Megabytes (10^6 bytes) with about three digits."""
    if num_bytes is None:
        return "–"
    value = num_bytes / 1e6
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(factor: float | None) -> str:
    """A factor: `14.5×`."""
    if factor is None or not math.isfinite(factor):
        return "–"
    return f"{factor:.0f}×" if factor >= 100 else f"{factor:.1f}×" if factor >= 10 else f"{factor:.2f}×"


def percent(fraction: float | None, digits: int = 1) -> str:
    """A signed percentage."""
    if fraction is None or not math.isfinite(fraction):
        return "–"
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return f"{round(100 * fraction, digits) + 0.0:+.{digits}f} %"


def number(value: float | None, digits: int) -> str:
    """A number, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def tables(result: TrainingResult, index: int = 0) -> list[Table]:
    """The rich tables of one rate: results, and shares of the step time."""
    made = [_new_table(f"{_conditions(result)} at {rate_text(result.rates[index])}", _OUTCOME)]
    made.append(_new_table(f"step at {rate_text(result.rates[index])}, in ms", _TIMES))
    for entry in result.results:
        style = "bold" if entry is headline_method(result, index) else ""
        cells = outcome(result, entry, index) | {"difference": _colored(result.loss_difference(entry))}
        made[0].add_row(short_label(entry), *cells.values(), style=style)
        made[1].add_row(short_label(entry), *_time_cells(entry.times[index]), style=style)
    made[1].caption = (
        "compute: the step without communication; ideal: the larger of that and bytes over rate\n"
        "encode, decode: codec time not hidden by compute; wire: the rest"
    )
    return made


_OUTCOME = ("step ms", "speed-up", "÷ ideal", "MB/step", "interface", "ratio", "loss", "vs fp32", "accuracy")
_TIMES = ("step", "p20–p80", "ideal", "compute", "encode", "wire", "decode")


def _new_table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("method", no_wrap=True)
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _conditions(result: TrainingResult) -> str:
    source = "measured" if result.shaped else "predicted"
    steps = f", validation after {result.train_steps} steps" if result.train_steps else ""
    return f"{result.ranks} ranks, step times {source}{steps},"


def outcome(result: TrainingResult, entry: MethodResult, index: int) -> dict[str, str]:
    """Results of a method at one rate, for readers."""
    time = entry.times[index]
    return {
        "step": milliseconds(time.step.median),
        "speedup": times(result.speedup(entry, index)),
        "over_ideal": f"{time.over_ideal:.2f}",
        "bytes": megabytes(time.bytes),
        "interface": megabytes(time.interface_bytes),
        "ratio": times(time.ratio),
        "loss": number(entry.validation_loss, 3),
        "difference": percent(result.loss_difference(entry)),
        "accuracy": "–" if entry.validation_accuracy is None else f"{100 * entry.validation_accuracy:.1f} %",
    }


def _time_cells(time: StepTime) -> list[str]:
    split = time.split
    parts = (time.ideal, split.compute, split.encode, split.wire, split.decode)
    return [milliseconds(time.step.median), spread(time), *(milliseconds(part) for part in parts)]


def short_label(entry: MethodResult) -> str:
    """A display name without the word gradwire."""
    return entry.label.removeprefix("gradwire ")


def spread(time: StepTime) -> str:
    """The percentiles of a measured step time."""
    return f"{milliseconds(time.step.p20)}–{milliseconds(time.step.p80)}" if time.measured else "predicted"


def _colored(difference: float | None) -> str:
    text = percent(difference)
    if difference is None or math.isnan(difference):
        return text
    return f"[{'green' if difference <= LOSS_TOLERANCE else 'red'}]{text}[/]"


def kernel_table(rows: Sequence[KernelTiming]) -> Table:
    """The rich table of the kernel benchmark."""
    from rich import box
    from rich.table import Table

    made = Table(title="kernels, one thread", box=box.SIMPLE_HEAD)
    made.add_column("kernel", no_wrap=True)
    for name in ("rate", "p20–p80", "of copy", "of mix", "vs rival"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("rival")
    for row in rows:
        made.add_row(
            f"{row.kernel} {row.dtype}",
            f"{row.median:.2f} {row.unit}",
            f"{row.p20:.2f}–{row.p80:.2f}",
            f"{row.fraction_of_copy:.2f}",
            f"{row.fraction_of_mix:.2f}",
            times(row.speedup) if row.rival else "–",
            row.rival or "–",
        )
    return made


def headline_method(result: TrainingResult, index: int = 0) -> MethodResult | None:
    """The fastest of gradwire's methods that learned as much as DDP fp32, or None."""
    good = [
        entry
        for entry in result.results
        if not methods.is_native(entry.method)
        and ((difference := result.loss_difference(entry)) is None or difference <= LOSS_TOLERANCE)
    ]
    return min(good, key=lambda entry: entry.times[index].step.median, default=None)


def headline(result: TrainingResult, index: int = 0) -> str:
    """The result in one sentence, with its conditions."""
    where = f"With {result.ranks} ranks at {rate_text(result.rates[index])}"
    best, baseline = headline_method(result, index), result.of(methods.DDP_FP32)
    if best is None:
        return (
            f"{where}, no method of gradwire came within {100 * LOSS_TOLERANCE:.0f} % "
            f"of DDP fp32's validation loss after {result.train_steps} steps."
        )
    how = "a step" if result.shaped else "a step (predicted, not measured)"
    sentence = f"{where}, {best.label} takes {_seconds(best.times[index])} {how}"
    if baseline is None:
        return f"{sentence}."
    sentence += f", {comparison(result.speedup(best, index))} DDP fp32 ({_seconds(baseline.times[index])})"
    difference = result.loss_difference(best)
    if difference is None:
        return f"{sentence}; what it learns was not measured."
    return f"{sentence}; after {result.train_steps} steps its validation loss is {above(difference)} DDP's."


def agreement(result: TrainingResult) -> str:
    """A sentence on the largest difference between the interface's byte count and our own; "" outside of the lab."""
    counted = [time for entry in result.results for time in entry.times if time.interface_bytes is not None]
    if not counted:
        return ""
    payload = max(abs(time.interface_difference or 0.0) for time in counted)
    headers = max(relative_difference(time.interface_bytes or 0.0, time.bytes) for time in counted)
    return (
        f"The interfaces counted the same bytes within {100 * payload:.2f} %, and up to {100 * headers:.1f} % more "
        "with the headers of Ethernet, IP and TCP."
    )


def comparison(speedup: float | None) -> str:
    """`15.4 times faster than`, or slower."""
    if speedup is None or not math.isfinite(speedup):
        return "against"
    if speedup < 1:
        return f"{times(1 / speedup).removesuffix('×')} times slower than"
    return f"{times(speedup).removesuffix('×')} times faster than"


def above(difference: float) -> str:
    """`0.3 % above`, or below."""
    return f"{abs(100 * difference):.1f} % {'above' if difference >= 0 else 'below'}"


def _seconds(time: StepTime) -> str:
    seconds = time.step.median
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
