"""The report: one self-contained HTML file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from gradwire.bench import methods, plots
from gradwire.bench.records import write_csv
from gradwire.bench.results import MethodResult, TrainingResult
from gradwire.bench.table import (
    LOSS_TOLERANCE,
    above,
    agreement,
    comparison,
    headline,
    headline_method,
    megabytes,
    milliseconds,
    outcome,
    percent,
    rate_text,
    spread,
    times,
)

_NAME = "index.html"


def write_report(result: TrainingResult, folder: Path) -> Path:
    """Write the page, and the figures as JSON and CSV; return the path of the page.

    Args:
        result: Result of a run.
        folder: Folder for the files. It is created if missing, and files of an earlier report are overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    write_csv(result, folder / "results.csv")
    path = folder / _NAME
    path.write_text(render(result))
    return path


def render(result: TrainingResult) -> str:
    """The HTML of the page."""
    import jinja2

    files = resources.files("gradwire.bench")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files / "report.html").read_text())
    return template.render(
        style=(files / "report.css").read_text(),
        headline=headline(result),
        agreement=agreement(result),
        result=result,
        cards=_cards(result),
        sections=[_section(result, index) for index in range(len(result.rates))],
        loss_plot=plots.loss_by_step(result) if any(entry.losses for entry in result.results) else "",
        tolerance=f"{100 * LOSS_TOLERANCE:.0f} %",
        losses=_verdicts(result),
    )


def _section(result: TrainingResult, index: int) -> dict[str, Any]:
    """Table and plots of one rate."""
    curves = any(entry.losses for entry in result.results)
    return {
        "rate": rate_text(result.rates[index]),
        "compute": milliseconds(result.results[0].times[index].compute),
        "rows": [_row(result, entry, index) for entry in result.results],
        "plots": [
            ("Step time against its ideal", plots.step_against_ideal(result, index)),
            ("Bytes per step", plots.bytes_by_method(result, index)),
            ("Where a step's time goes", plots.time_split(result, index)),
            *([("Loss against time", plots.loss_by_time(result, index))] if curves else []),
        ],
    }


def _row(result: TrainingResult, entry: MethodResult, index: int) -> dict[str, Any]:
    time, difference = entry.times[index], result.loss_difference(entry)
    speedup = result.speedup(entry, index)
    return outcome(result, entry, index) | {
        "label": entry.label,
        "color": plots.colors(result)[entry.method],
        "best": entry is headline_method(result, index),
        "spread": spread(time),
        "slower": speedup is not None and speedup < 1,
        "interface_difference": percent(time.interface_difference, 2),
        "lost": difference is not None and not difference <= LOSS_TOLERANCE,
        "identical": entry.identical,
        "bucket": f"{time.bucket_mb:g} MB" if methods.tries_buckets(entry.method) else "",
    }


def _cards(result: TrainingResult) -> list[tuple[str, str, str]]:
    """Key figures of the headline's method: figure, meaning, comparison."""
    best = headline_method(result)
    if best is None:
        return []
    time = best.times[0]
    rate = rate_text(result.rates[0])
    cards = [
        (times(result.speedup(best)), "faster per step", f"than DDP fp32 at {rate}"),
        (f"{time.over_ideal:.2f} ×", "the ideal step", f"{milliseconds(time.ideal)} ms at {rate}"),
        (times(time.ratio), "fewer bytes", f"{megabytes(time.bytes)} MB sent per rank and step"),
    ]
    difference = result.loss_difference(best)
    if difference is not None:
        cards.append((percent(difference), "validation loss", f"against DDP fp32 after {result.train_steps} steps"))
    fp16 = result.of(methods.DDP_FP16)
    if fp16 is not None:
        factor = fp16.times[0].step.median / time.step.median
        cards.insert(1, (times(factor), "faster per step", "than DDP with its fp16 hook"))
    return cards


def _verdicts(result: TrainingResult) -> list[str]:
    """Sentences on what gradwire's methods did worse than DDP fp32."""
    found = []
    for entry in result.results:
        if methods.is_native(entry.method):
            continue
        difference = result.loss_difference(entry)
        if difference is not None and not difference <= LOSS_TOLERANCE:
            found.append(f"{entry.label} ends with a validation loss {above(difference)} DDP fp32's.")
        for index, rate in enumerate(result.rates):
            speedup = result.speedup(entry, index)
            if speedup is not None and speedup < 1:
                found.append(f"At {rate_text(rate)}, a step of {entry.label} is {comparison(speedup)} one of DDP fp32.")
        if not entry.identical:
            found.append(f"{entry.label} left ranks with different bits: this is a bug, please report it.")
    return found
