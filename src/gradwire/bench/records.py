"""Records of benchmarks: CSV files with one row for each figure.

Every row has the commit and the date of its run. A record in `benchmarks/results` is written only if the checkout has
no changes. Other files can be written at any time; their commit then ends in ``-dirty``.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.bench import environment as environments
from gradwire.bench.environment import RECORDS, Checkout, environment
from gradwire.bench.results import MethodResult, StepTime, TrainingResult
from gradwire.bench.statistics import Spread
from gradwire.core.errors import GradwireError

if TYPE_CHECKING:
    from gradwire.bench.measure import KernelTiming

COLUMNS = (
    "benchmark", "method", "metric", "value", "unit", "p20", "p80", "samples", "dtype", "size", "ranks", "rate",
    "source", "device", "cores", "versions", "commit", "date",
)  # fmt: skip
WHERE = ("benchmark", "device", "cores", "versions", "commit", "date")
# Columns that are never numbers. A commit may look like one: 12e4567.
TEXT = {"benchmark", "method", "metric", "unit", "dtype", "rate", "source", "device", "versions", "commit", "date"}
_MAX_FIELD_CHARACTERS = 1 << 24  # a plan of hundreds of tensors is longer than the limit of the csv module


class RecordError(GradwireError):
    """A record cannot be written, because the checkout has changes."""


def check_record(path: Path) -> None:
    """Check that a file may be written. Call it before a long run.

    Raises:
        RecordError: The file is a record, and the checkout has changes.
    """
    checkout = Checkout.of(environments.ROOT)
    if checkout is None or not path.resolve().is_relative_to((checkout.root / RECORDS).resolve()):
        return
    if changes := checkout.changes():
        shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
        raise RecordError(
            f"{path} is a record, but these files differ from commit {checkout.commit}: {shown}. "
            "Commit them first, or write to another file with --csv."
        )


def write_csv(result: TrainingResult, path: Path) -> None:
    """Write all figures of a training run."""
    _write(rows(result), path)


def write_kernels_csv(rows: Sequence[KernelTiming], path: Path) -> None:
    """Write the rates of the kernel benchmark. `size` is in bytes of the float32 gradient."""
    figures, fixed = [], {"ranks": 1, "rate": "none", "source": "measured"}
    for row in rows:
        here = fixed | {"method": row.kernel, "dtype": row.dtype, "size": row.size}
        spread = {"value": row.median, "p20": row.p20, "p80": row.p80}
        figures.append({**here, **spread, "metric": "rate", "unit": row.unit})
        figures.append({**here, "metric": "fraction_of_copy", "unit": "ratio", "value": row.fraction_of_copy})
        figures.append({**here, "metric": "fraction_of_mix", "unit": "ratio", "value": row.fraction_of_mix})
        if row.rival:
            figures.append({**here, "metric": f"speedup over {row.rival}", "unit": "ratio", "value": row.speedup})
    write_figures("kernels", figures, path)


def write_figures(benchmark: str, figures: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the figures of a benchmark, which may have columns of its own.

    Rows read from a record keep their commit and date. Rows without a metric are written with their own columns first.
    """
    where = _where(benchmark, environment())
    _write([{**where, **figure} for figure in figures], path)


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Rows of a file written by this module. Numbers are parsed, and empty cells are None."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    with path.open(newline="") as file:
        return [
            {name: text if name in TEXT and text else _number(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def _number(text: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _write(figures: Iterable[dict[str, Any]], path: Path) -> None:
    found = list(figures)
    known = dict.fromkeys(name for row in found for name in row)
    leading, last = (COLUMNS, ()) if "metric" in known or not found else ((), WHERE)
    columns = [*leading, *(name for name in known if name not in (*leading, *last)), *last]
    try:
        check_record(path)
    except RecordError as error:  # do not lose what was measured
        path = Path(tempfile.mkdtemp(prefix="gradwire-")) / path.name
        _write(found, path)
        raise RecordError(f"{error} The figures are in {path}.") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    # In another file first: a record may hold the work of days when the process ends here.
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    unfinished.replace(path)


def _where(benchmark: str, environment: dict[str, str]) -> dict[str, Any]:
    versions = " ".join(f"{name}={environment[name]}" for name in ("gradwire", "torch", "numba", "python"))
    fixed = {name: environment[name] for name in ("device", "cores", "commit", "date")}
    return {"benchmark": benchmark, "versions": versions, **fixed}


def rows(result: TrainingResult) -> Iterator[dict[str, Any]]:
    """One row for each figure. `size` is the number of parameters, `source` is measured, predicted or computed."""
    where = _where("replay" if result.replayed else "training", result.environment)
    fixed = {**where, "dtype": "float32", "size": result.num_parameters, "ranks": result.ranks}
    for entry in result.results:
        for row in [*_learning(result, entry), *_steps(result, entry)]:
            # A method without a loss curve has no rows for losses.
            if row["value"] is not None:
                yield {**fixed, "method": entry.method, **row}


def _learning(result: TrainingResult, entry: MethodResult) -> Iterator[dict[str, Any]]:
    if entry.validation_loss is None:
        return
    yield _row("validation_loss", entry.validation_loss, "nats")
    yield _row("validation_accuracy", entry.validation_accuracy, "fraction")
    yield _row("loss_difference", result.loss_difference(entry), "fraction")


def _steps(result: TrainingResult, entry: MethodResult) -> Iterator[dict[str, Any]]:
    for index, time in enumerate(entry.times):
        for row in _at_rate(time):
            yield row | {"rate": time.rate or "none"}
        yield _row("speedup", result.speedup(entry, index), "ratio", _source(time)) | {"rate": time.rate or "none"}


def _at_rate(time: StepTime) -> Iterator[dict[str, Any]]:
    source = _source(time)
    yield _row("step", time.step, "s", source)
    yield _row("bucket", time.bucket_mb, "MB")
    yield _row("step_without_communication", time.compute, "s")
    yield _row("ideal_step", time.ideal, "s", "computed")
    yield _row("step_over_ideal", time.over_ideal, "ratio", source)
    yield _row("processor", time.processor or None, "s")
    yield _row("bytes", time.bytes, "B")
    yield _row("interface_bytes", time.interface_bytes, "B")
    yield _row("interface_payload", time.interface_payload, "B")
    yield _row("compression_ratio", time.ratio, "ratio")
    for name in ("compute", "encode", "wire", "decode"):
        yield _row(f"split_{name}", getattr(time.split, name), "s", source)


def _source(time: StepTime) -> str:
    return "measured" if time.measured else "predicted"


def _row(metric: str, value: Spread | float | None, unit: str, source: str = "measured") -> dict[str, Any]:
    row = {"metric": metric, "unit": unit, "source": source}
    if isinstance(value, Spread):
        return row | {"value": value.median, "p20": value.p20, "p80": value.p80, "samples": value.size}
    if value is not None and not math.isfinite(value):
        value = None
    return row | {"value": value}
