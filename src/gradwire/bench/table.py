"""The results as a table on the terminal, and the numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.bench import methods
from gradwire.bench.results import MethodResult, StepTime, TrainingResult
from gradwire.lab.units import format_rate, parse_rate

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.bench.kernels import Row

LOSS_TOLERANCE = 0.03
"""Up to this much above DDP fp32's validation loss a method counts as having learnt the same."""

_UNITS = {"gbit": "Gb/s", "mbit": "Mb/s", "kbit": "kb/s", "bit": "b/s"}


def rate_text(rate: str | None) -> str:
    """A rate as readers write it: `100 Mb/s`."""
    text = format_rate(parse_rate(rate))
    for unit, written in _UNITS.items():
        if text.endswith(unit):
            return f"{text.removesuffix(unit)} {written}"
    return "unshaped"


def milliseconds(seconds: float) -> str:
    """With about three digits."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def megabytes(num_bytes: float | None) -> str:
    """In millions of bytes, with about three digits."""
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
    return f"{100 * fraction:+.{digits}f} %"


def number(value: float | None, digits: int) -> str:
    """A plain number, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def table(result: TrainingResult, index: int = 0) -> Table:
    """The rich table of one rate."""
    from rich import box
    from rich.table import Table

    rate = rate_text(result.rates[index])
    source = "measured" if result.shaped else "predicted"
    made = Table(
        title=f"{result.ranks} ranks at {rate}, step times {source}: {result.workload}",
        caption=_caption(result),
        box=box.SIMPLE_HEAD,
    )
    made.add_column("method", no_wrap=True)
    for name in _COLUMNS:
        made.add_column(name, justify="right", no_wrap=True)
    for entry in result.results:
        style = "bold" if entry is headline_method(result, index) else ""
        made.add_row(entry.label, *_cells(result, entry, index), style=style)
    return made


_COLUMNS = (
    "step ms", "p20–p80", "speed-up", "÷ ideal", "MB/step", "at iface", "ratio",
    "val. loss", "vs fp32", "acc.", "comp ms", "enc ms", "wire ms", "dec ms",
)  # fmt: skip


def _cells(result: TrainingResult, entry: MethodResult, index: int) -> list[str]:
    time = entry.times[index]
    return [
        milliseconds(time.step.median),
        spread(time),
        times(result.speedup(entry, index)),
        f"{time.over_ideal:.2f}",
        megabytes(time.bytes),
        megabytes(time.interface_bytes),
        times(time.ratio),
        number(entry.validation_loss, 3),
        _coloured(result.loss_difference(entry)),
        "–" if entry.validation_accuracy is None else f"{100 * entry.validation_accuracy:.1f} %",
        milliseconds(time.split.compute),
        milliseconds(time.split.encode),
        milliseconds(time.split.wire),
        milliseconds(time.split.decode),
    ]


def spread(time: StepTime) -> str:
    """The percentiles of a measured step time."""
    return f"{milliseconds(time.step.p20)}–{milliseconds(time.step.p80)}" if time.measured else "predicted"


def _coloured(difference: float | None) -> str:
    text = percent(difference)
    if difference is None or math.isnan(difference):
        return text
    return f"[{'green' if difference <= LOSS_TOLERANCE else 'red'}]{text}[/]"


def _caption(result: TrainingResult) -> str:
    compute = result.results[0].times[0].compute
    lines = [
        f"step without communication {milliseconds(compute)} ms; ideal = the larger of that and bytes over rate;",
        f"bytes sent by each rank; losses after {result.train_steps} steps on links as they are",
    ]
    return " ".join(lines)


def kernel_table(rows: Sequence[Row]) -> Table:
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
    """The fastest of gradwire's methods that learnt as much as DDP fp32; None where there is none."""
    good = [
        entry
        for entry in result.results
        if not methods.is_native(entry.method)
        and (difference := result.loss_difference(entry)) is not None
        and difference <= LOSS_TOLERANCE
    ]
    return min(good, key=lambda entry: entry.times[index].step.median, default=None)


def headline(result: TrainingResult, index: int = 0) -> str:
    """One sentence: what was gained, and under which conditions."""
    rate = rate_text(result.rates[index])
    best, baseline = headline_method(result, index), result.of(methods.DDP_FP32)
    if baseline is None or baseline.validation_loss is None:
        return f"{len(result.results)} methods with {result.ranks} ranks at {rate}."
    if best is None:
        return (
            f"With {result.ranks} ranks at {rate}, no method of gradwire came within {100 * LOSS_TOLERANCE:.0f} % "
            f"of DDP fp32's validation loss after {result.train_steps} steps."
        )
    speedup = result.speedup(best, index) or math.nan
    factor = f"{times(speedup).removesuffix('×')} times {'faster' if speedup >= 1 else 'as fast as, so slower'}"
    how = "a step" if result.shaped else "a step (predicted, not measured)"
    return (
        f"With {result.ranks} ranks at {rate}, {best.label} takes {_seconds(best.times[index])} {how}, {factor} than "
        f"DDP fp32 ({_seconds(baseline.times[index])}); after {result.train_steps} steps its validation loss is "
        f"{percent(result.loss_difference(best))} of DDP's."
    )


def _seconds(time: StepTime) -> str:
    seconds = time.step.median
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
