"""`gradwire demo`: train a real model on a slow network, with and without compression."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.files import out_file, out_folder


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("demo")(demo)


def demo(
    hosts: Annotated[int, typer.Option(help="Number of ranks, one per host.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Rate of each link in both directions, such as 10mbit, 1gbit or none.")
    ] = "100mbit",
    steps: Annotated[int | None, typer.Option(help="Training steps per method. Default: 150; with --full, 32.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, such as ddp-fp32,threelc,topk:ratio=0.01.")] = None,
    full: Annotated[bool, typer.Option("--full", help="More methods, with a larger model.")] = False,
    out: Annotated[Path, out_folder(help="Folder of the report.")] = Path("gradwire-report"),
    csv: Annotated[Path | None, out_file(help="File of the figures. Default: results.csv in the report.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Model and data: small, text (with --full), or digits (tiny).")
    ] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="Do not shape links, even if it is possible.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train a real model with several ranks over a slow network, and see what compression saves.

    Each method trains the same model on the same data in the same order. Prints a table and writes a report with plots.
    Shaping links needs root or unprivileged user namespaces; without them, step times are predicted. Takes about a
    minute and a half on two cores, and four minutes with --full. The first run on a machine compiles for a minute more.

    Example: gradwire demo --rate 1gbit --methods ddp-fp32,ddp-fp16,threelc
    """
    from gradwire.bench.extras import need

    need("matplotlib", "jinja2", extra="cli,report", purpose="the demo's report")
    from gradwire.bench.demo import FULL, SHORT
    from gradwire.bench.records import check_record, write_csv
    from gradwire.bench.report import write_report
    from gradwire.cli.bench import run_with_bars, show, split_methods

    if csv is not None:
        check_record(csv)
    chosen = FULL if full else SHORT
    options = replace(
        chosen,
        workload=workload or chosen.workload,
        methods=chosen.methods if methods is None else split_methods(methods),
        ranks=hosts,
        rates=(rate,),
        steps=chosen.steps if steps is None else steps,
        lab=False if loopback else None,
    )
    result = run_with_bars(options)
    path = write_report(result, out)
    if csv is not None:
        write_csv(result, csv)
    if as_json:
        typer.echo(json.dumps(result.as_dict() | {"report": str(path.resolve())}, indent=2))
    else:
        show(result)
        typer.echo(
            f"{result.train_steps} steps are the beginning of a training: its end can differ, in either direction."
        )
        typer.echo(f"Report: {path.resolve()}")
