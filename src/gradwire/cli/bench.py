"""`gradwire bench`: time kernels, compressors and training steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.files import out_file, out_folder
from gradwire.cli.options import grouped, numbers, split

if TYPE_CHECKING:
    from gradwire.bench.measure import KernelTiming
    from gradwire.bench.results import TrainingResult
    from gradwire.bench.training import TrainingOptions

RESULTS = Path("benchmarks/results")
_RECORD = "File of the figures. Default: the record in benchmarks/results, or none with --only."


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(help="Run benchmarks of kernels, compressors and training.", no_args_is_help=True)
    group.command("kernels")(kernels)
    group.command("compressors")(compressors)
    group.command("training")(grouped(training))
    app.add_typer(group, name="bench")


@dataclass(frozen=True)
class TrainingJob:
    """Training job."""

    workload: Annotated[
        str, typer.Option(help="Model and data: text (large tensors), deep (small ones) or digits (tiny).")
    ] = "text"
    methods: Annotated[str | None, typer.Option(help="Methods, such as ddp-fp32,threelc,topk:ratio=0.01.")] = None
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4
    rates: Annotated[str, typer.Option(help="Rates of each link, such as 100mbit,1gbit,none.")] = "100mbit"
    buckets: Annotated[
        str, typer.Option(help="Bucket sizes in MB: the first for all methods, the others for DDP to choose from.")
    ] = "4,25,1"
    seed: Annotated[int, typer.Option(help="Seed of model and data.")] = 0


@dataclass(frozen=True)
class TrainingTiming:
    """Measurement."""

    steps: Annotated[int, typer.Option(help="Training steps per method, for the loss curve.")] = 150
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to time each method at each rate.")] = 8.0
    replay: Annotated[bool, typer.Option("--replay", help="Replay a recorded backward pass as waits.")] = False
    loopback: Annotated[bool, typer.Option("--loopback", help="Do not shape links, even if it is possible.")] = False
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the run ends with an error.")] = 1800.0


@dataclass(frozen=True)
class TrainingOutput:
    """Output."""

    csv: Annotated[Path | None, out_file(help="File of the figures. Default: none.")] = None
    out: Annotated[Path | None, out_folder(help="Folder for a report with plots.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False


def training(job: TrainingJob, timing: TrainingTiming, output: TrainingOutput) -> None:
    """Time training steps and record loss curves for each method at each rate.

    Two cores cannot compute for four ranks without disturbing the clock. With --replay, the backward pass of a single
    rank is recorded and then replayed as waits with its real gradients. Codecs and network are real.

    Example: gradwire bench training --rates 100mbit,1gbit --methods ddp-fp32,ddp-fp16,threelc --replay
    """
    from gradwire.bench.records import check_record, write_csv
    from gradwire.bench.training import TrainingOptions

    if output.csv is not None:
        check_record(output.csv)
    if output.out is not None:
        from gradwire.bench.extras import need

        need("matplotlib", "jinja2", extra="cli,report", purpose="the report")
    options = TrainingOptions(
        workload=job.workload,
        methods=split_methods(job.methods),
        ranks=job.ranks,
        rates=tuple(split(job.rates)),
        steps=0 if timing.replay else timing.steps,
        timed_seconds=timing.seconds,
        buckets_mb=tuple(numbers(job.buckets)),
        seed=job.seed,
        lab=False if timing.loopback else None,
        deadline_seconds=timing.timeout,
        replay=timing.replay,
    )
    result = run_with_bars(options)
    if output.csv is not None:
        write_csv(result, output.csv)
    if output.out is not None:
        from gradwire.bench.report import write_report

        write_report(result, output.out)
    if output.as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        show(result)
        if output.csv is not None:
            typer.echo(f"Figures: {output.csv.resolve()}")


def kernels(
    size: Annotated[int, typer.Option(min=1, help="Size of the gradient in MB. Below 256 it may fit the cache.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per kernel.")] = 7,
    only: Annotated[str | None, typer.Option(help="Time only kernels whose names contain this.")] = None,
    csv: Annotated[Path | None, out_file(help=_RECORD)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Time every CPU kernel on one thread, next to a copy of the same memory.

    Example: gradwire bench kernels --only ternary
    """
    from gradwire.bench.kernels import run
    from gradwire.bench.records import check_record

    path = csv or (RESULTS / "kernels.csv" if only is None else None)
    if path is not None:
        check_record(path)
    _report(run(size_mb=size, repeats=repeats, only=only), path, as_json)


def compressors(
    size: Annotated[int, typer.Option(min=1, help="Size of the gradient in MB. Below 256 it may fit the cache.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per call.")] = 7,
    only: Annotated[str | None, typer.Option(help="Time only compressors whose names contain this.")] = None,
    first_use: Annotated[bool, typer.Option("--first-use", help="Time first calls in new processes instead.")] = False,
    csv: Annotated[Path | None, out_file(help=_RECORD)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Time encoding and decoding with every compressor on one thread, next to a copy and to plain torch.

    Example: gradwire bench compressors --only dgc
    """
    from gradwire.bench.compressors import first_uses, run

    if first_use:
        for name, cold, warm in first_uses(only):
            typer.echo(f"{name:10} compiled {cold:5.2f} s, from the cache {warm:5.2f} s")
        return
    from gradwire.bench.records import check_record

    path = csv or (RESULTS / "compressors.csv" if only is None else None)
    if path is not None:
        check_record(path)
    _report(run(size_mb=size, repeats=repeats, only=only), path, as_json)


def _report(rows: list[KernelTiming], csv: Path | None, as_json: bool) -> None:
    """Write rows to a file, if one is given, and print them."""
    from dataclasses import asdict

    from gradwire.bench.environment import environment
    from gradwire.bench.records import write_kernels_csv

    if csv is not None:
        write_kernels_csv(rows, csv)
    if as_json:
        data = {"environment": environment(), "kernels": [asdict(row) for row in rows]}
        typer.echo(json.dumps(data, indent=2))
    else:
        from rich.console import Console

        from gradwire.bench.table import kernel_table

        Console().print(kernel_table(rows))
        if csv is not None:
            typer.echo(f"Figures: {csv.resolve()}")


def run_with_bars(options: TrainingOptions) -> TrainingResult:
    """Run a training benchmark with progress bars on standard error."""
    from rich.console import Console

    from gradwire.bench.progress import Bars
    from gradwire.bench.training import run, segments_of

    options.check()
    with Bars(len(segments_of(options)), Console(stderr=True)) as bars:
        return run(options, bars)


def show(result: TrainingResult) -> None:
    """Print headline, tables and notes."""
    from rich.console import Console

    from gradwire.bench.table import agreement, headline, tables

    console = Console()
    # Fewer columns would cut the numbers off, and a pipe has no width.
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
    """Method names of a comma-separated list; None means the default methods."""
    from gradwire.bench.methods import DEFAULT_METHODS

    return DEFAULT_METHODS if text is None else tuple(split(text))
