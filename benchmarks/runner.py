"""Run a benchmark of the catalog: options, record, table and plots.

The module of a benchmark has:

- `run(**options)`, which measures and returns rows of figures. Its parameters are the options of the command line. A
  parameter `done` receives the keys of rows that the record already has, which `run` then omits. A parameter `recorded`
  receives all rows of the record.
- `table(rows)`, the text to print.
- `plot(rows, folder)`, if there is something to draw.
- `KEY` and `CHOICES`, if parts can be run separately: the columns that identify a part, and the options that choose
  parts. The rows of a part are written as soon as all of them are there, and replace the part's earlier rows. If `run`
  yields single rows, that is when the next part begins; a list of rows is a whole part, and is written at once.

A record is written only if the given options choose parts or name a folder of data. Any other run is a trial: it writes
to the file of `--csv`, or nothing.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer

from benchmarks.catalog import Benchmark
from benchmarks.keys import Row, key_of, merged
from gradwire.bench.extras import need
from gradwire.bench.records import WHERE, check_record, read_figures, write_figures

Csv = Annotated[Path | None, typer.Option(help="File for the figures. Default: the record, or none for a trial.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the plots.")]
Again = Annotated[bool, typer.Option("--again", help="Measure what the file has already, too.")]
ADDED = {"csv": (Csv, None), "out": (Out, None)}


def module_of(benchmark: Benchmark) -> ModuleType:
    """The module that measures."""
    return importlib.import_module(f"benchmarks.{benchmark.module}")


def command(benchmark: Benchmark) -> typer.Typer:
    """The command line of one benchmark."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=benchmark.question)(_with_options(benchmark, module_of(benchmark)))
    return app


def _with_options(benchmark: Benchmark, module: ModuleType) -> Callable[..., None]:
    """`execute` with the parameters of the module's `run`, and those that all benchmarks have."""
    own = dict(inspect.signature(module.run, eval_str=True).parameters)
    own.pop("recorded", None)
    added = ADDED | ({"again": (Again, False)} if own.pop("done", None) else {})
    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, default=benchmark.presets.get(name, parameter.default))
        for name, parameter in own.items()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in added.items()
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    def main(context: typer.Context, csv: Path | None, out: Path | None, again: bool = False, **options: Any) -> None:
        sources = {name: context.get_parameter_source(name) for name in options}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        free = {name for name, value in options.items() if isinstance(value, Path)} | {*getattr(module, "CHOICES", ())}
        record = benchmark.record if given <= free else None
        execute(module, benchmark.name, csv or record, out, again, **options)

    main.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    main.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    return main


def execute(
    module: ModuleType, name: str, csv: Path | None, out: Path | None, again: bool = False, **options: Any
) -> None:
    """Run a benchmark, write its figures, and show them.

    Args:
        module: The benchmark.
        name: Its name in the record.
        csv: The file; None for a trial that leaves none.
        out: Folder for the plots.
        again: Whether parts that the file has are measured, too.
        **options: Those of `run`.
    """
    if out:
        need("matplotlib", extra="report", purpose="the plots")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = csv or Path(folder) / f"{name}.csv"
        check_record(path)
        key = tuple(getattr(module, "KEY", ()))
        recorded = read_figures(path) if path.exists() else []
        known = {"done": set() if again else {key_of(row, key) for row in recorded}, "recorded": recorded}
        options |= {name: known[name] for name in known if name in inspect.signature(module.run).parameters}
        written = record(name, module.run(**options), path, key)
        if csv and written:
            print(f"Figures: {csv.resolve()}")
        if path.exists():
            show(module, read_figures(path), out)


def record(name: str, rows: Iterable[Row | list[Row]], path: Path, key: Sequence[str] = ()) -> bool:
    """Write rows to a file, each part as soon as it is there; returns whether there were any.

    Earlier rows of other parts stay as they are, also where nobody knows their commit.
    """
    written = False
    for found in parts(rows, key):
        old = [dict.fromkeys(WHERE) | row for row in read_figures(path)] if key and path.exists() else []
        write_figures(name, merged(old, found, key), path)
        written = True
    return written


def parts(rows: Iterable[Row | list[Row]], key: Sequence[str]) -> Iterator[list[Row]]:
    """The parts of a record: lists as they are, and single rows that follow each other and have the same key."""
    found: list[Row] = []
    for each in rows:
        if found and (isinstance(each, list) or key_of(each, key) != key_of(found[0], key)):
            yield found
            found = []
        if isinstance(each, list):
            yield each
        else:
            found.append(each)
    if found:
        yield found


def show(module: ModuleType, rows: list[Row], out: Path | None) -> None:
    """Print the table, and draw the plots."""
    print(module.table(rows))
    if out and hasattr(module, "plot"):
        module.plot(rows, out)
        print(f"Plots: {out.resolve()}")
