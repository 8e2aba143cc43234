"""`gradwire demo`: a real model on a slow network, dense against compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.files import out_folder


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("demo")(demo)


def demo(
    hosts: Annotated[int, typer.Option(help="How many ranks, each on a host of its own.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each link, both ways: 10mbit, 1gbit, none.")] = "100mbit",
    steps: Annotated[int, typer.Option(help="Training steps of each method.")] = 32,
    methods: Annotated[str | None, typer.Option(help="Which ones, such as ddp-fp32,threelc,topk:ratio=0.01.")] = None,
    out: Annotated[Path, out_folder(help="Folder of the report.")] = Path("gradwire-report"),
    workload: Annotated[str, typer.Option(help="text, or digits (tiny).")] = "text",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Do not shape links, even where it can be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and no table.")] = False,
) -> None:
    """Train a real model with several ranks over a slow network, and see what compression saves.

    Each method trains the same model on the same data, in the same order. Prints a table and writes a report
    with plots. Needs root or unprivileged user namespaces to shape links; without, step times are predicted.
    About four minutes on two cores.

    Example: gradwire demo --rate 1gbit --methods ddp-fp32,ddp-fp16,threelc
    """
    from gradwire.bench.extras import need

    need("matplotlib", "jinja2", extra="cli,report", purpose="the demo's report")
    from gradwire.bench.report import write_report
    from gradwire.bench.training import TrainingOptions
    from gradwire.cli.bench import run_with_bars, show, split_methods

    options = TrainingOptions(
        workload=workload,
        methods=split_methods(methods),
        ranks=hosts,
        rates=(rate,),
        steps=steps,
        timed_seconds=3.0,
        lab=False if loopback else None,
    )
    result = run_with_bars(options)
    path = write_report(result, out)
    if as_json:
        typer.echo(json.dumps(result.as_dict() | {"report": str(path.resolve())}, indent=2))
    else:
        show(result)
        typer.echo(f"Report: {path.resolve()}")
