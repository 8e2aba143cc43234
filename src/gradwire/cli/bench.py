"""`gradwire bench kernels`, `gradwire bench compressors` and `gradwire bench training`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.files import out_file, out_folder

if TYPE_CHECKING:
    from gradwire.bench.measure import KernelTiming
    from gradwire.bench.results import TrainingResult
    from gradwire.bench.training import TrainingOptions

RESULTS = Path("benchmarks/results")


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    group = typer.Typer(help="The benchmarks.", no_args_is_help=True)
    group.command("kernels")(kernels)
    group.command("compressors")(compressors)
    group.command("training")(training)
    app.add_typer(group, name="bench")


def training(
    rates: Annotated[str, typer.Option(help="Of each link, one after another: 100mbit,1gbit,none.")] = "100mbit",
    methods: Annotated[str | None, typer.Option(help="Which ones, such as ddp-fp32,threelc,topk:ratio=0.01.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each method, for the loss curve.")] = 150,
    ranks: Annotated[int, typer.Option(help="How many ranks.")] = 4,
    workload: Annotated[str, typer.Option(help="text (large tensors), deep (small ones), digits (tiny).")] = "text",
    seconds: Annotated[float, typer.Option(min=0, help="How long to time each method at each rate.")] = 8.0,
    buckets: Annotated[
        str, typer.Option(help="Bucket sizes in MB: the first for all, the others for DDP to choose from.")
    ] = "4,25,1",
    replay: Annotated[bool, typer.Option("--replay", help="Replay a recorded backward as waits.")] = False,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Do not shape links, even where it can be done.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="End with an error after so many seconds.")] = 1800.0,
    seed: Annotated[int, typer.Option(help="Of model and data.")] = 0,
    csv: Annotated[Path | None, out_file(help="File for the figures; default in benchmarks/results.")] = None,
    out: Annotated[Path | None, out_folder(help="Folder for a report with plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and no table.")] = False,
) -> None:
    """Time training steps and learn loss curves, method by method, rate by rate.

    Two cores cannot compute for four ranks without disturbing the clock. With --replay the backward of one rank
    alone is recorded, and then replayed as waits with its real gradients; codecs and network are real.

    Example: gradwire bench training --rates 100mbit,1gbit --methods ddp-fp32,ddp-fp16,threelc --replay
    """
    from gradwire.bench.records import check_record, write_csv
    from gradwire.bench.training import TrainingOptions

    path = csv or RESULTS / f"{'replay' if replay else 'training'}-{workload}.csv"
    check_record(path)
    if out is not None:
        from gradwire.bench.extras import need

        need("matplotlib", "jinja2", extra="cli,report", purpose="the report")
    options = TrainingOptions(
        workload=workload,
        methods=split_methods(methods),
        ranks=ranks,
        rates=tuple(_split(rates)),
        steps=0 if replay else steps,
        timed_seconds=seconds,
        buckets_mb=tuple(_numbers(buckets)),
        seed=seed,
        lab=False if loopback else None,
        deadline_seconds=timeout,
        replay=replay,
    )
    result = run_with_bars(options)
    write_csv(result, path)
    if out is not None:
        from gradwire.bench.report import write_report

        write_report(result, out)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        show(result)
        typer.echo(f"Figures: {path.resolve()}")


def kernels(
    size: Annotated[int, typer.Option(min=1, help="Of the gradient, in MB; below 256 it may fit the cache.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kernel.")] = 7,
    only: Annotated[str | None, typer.Option(help="Kernels whose names contain this.")] = None,
    csv: Annotated[Path, out_file(help="File for the figures.")] = RESULTS / "kernels.csv",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and no table.")] = False,
) -> None:
    """Time every CPU kernel on one thread, against a copy of the same memory.

    Example: gradwire bench kernels --only ternary
    """
    from gradwire.bench.kernels import run
    from gradwire.bench.records import check_record

    check_record(csv)
    _report(run(size_mb=size, repeats=repeats, only=only), csv, as_json)


def compressors(
    size: Annotated[int, typer.Option(min=1, help="Of the gradient, in MB; below 256 it may fit the cache.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each call.")] = 7,
    only: Annotated[str | None, typer.Option(help="Compressors whose names contain this.")] = None,
    first_use: Annotated[bool, typer.Option("--first-use", help="Time first calls in new processes instead.")] = False,
    csv: Annotated[Path | None, out_file(help="File for the figures; default in benchmarks/results.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and no table.")] = False,
) -> None:
    """Time encoding and decoding with every compressor on one thread, against a copy and against plain torch.

    Example: gradwire bench compressors --only dgc
    """
    if first_use:
        from gradwire.bench.first_use import run as run_first_use

        for name, cold, warm in run_first_use(only):
            typer.echo(f"{name:10} compiled {cold:5.2f} s, from the cache {warm:5.2f} s")
        return
    from gradwire.bench.compressors import run
    from gradwire.bench.records import check_record

    path = csv or RESULTS / "compressors.csv"
    check_record(path)
    _report(run(size_mb=size, repeats=repeats, only=only), path, as_json)


def _report(rows: list[KernelTiming], csv: Path, as_json: bool) -> None:
    """Write rows to a file, and show them."""
    from dataclasses import asdict

    from gradwire.bench.environment import environment
    from gradwire.bench.records import write_kernels_csv

    write_kernels_csv(rows, environment(), csv)
    if as_json:
        data = {"environment": environment(), "kernels": [asdict(row) for row in rows]}
        typer.echo(json.dumps(data, indent=2))
    else:
        from rich.console import Console

        from gradwire.bench.table import kernel_table

        Console().print(kernel_table(rows))
        typer.echo(f"Figures: {csv.resolve()}")


def run_with_bars(options: TrainingOptions) -> TrainingResult:
    """Run a training benchmark with progress on standard error."""
    from rich.console import Console

    from gradwire.bench.progress import Bars
    from gradwire.bench.training import TrainingPlan, run

    options.check()
    with Bars(len(TrainingPlan.of(options).segments), Console(stderr=True)) as bars:
        return run(options, bars)


def show(result: TrainingResult) -> None:
    """Print headline, tables and notes."""
    from rich.console import Console

    from gradwire.bench.table import agreement, headline, tables

    console = Console()
    # Fewer columns would cut the numbers off, and a pipe has no width at all.
    console.width = max(console.width, 104)
    for index in range(len(result.rates)):
        for table in tables(result, index):
            console.print(table)
    for index in range(len(result.rates)):
        console.print(headline(result, index), highlight=False)
    if sentence := agreement(result):
        console.print(sentence, highlight=False)
    if result.note:
        console.print(f"[yellow]{result.note}[/]", highlight=False)
    console.print(f"Took {result.seconds:.0f} s.", highlight=False)


def split_methods(text: str | None) -> tuple[str, ...]:
    """Method names of a comma-separated list; None means all of the default ones."""
    from gradwire.bench.methods import DEFAULT_METHODS

    return DEFAULT_METHODS if text is None else tuple(_split(text))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in _split(text)]
    except ValueError:
        raise typer.BadParameter(f"Expected numbers such as 25,4, got {text!r}.") from None
