"""All commands of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

import gradwire
from gradwire.cli import (
    bench,
    check,
    compressors,
    demo,
    doctor,
    graph,
    lab,
    plan,
    probe,
    serve,
    show,
    simulate,
    tables,
    top,
)

COMMANDS = (demo, doctor, top, lab, probe, bench, compressors, check, show, tables, graph, plan, simulate, serve)
"""Modules of the commands, in the order of the help page."""


def build_app() -> typer.Typer:
    """Build the command line."""
    app = typer.Typer(
        name="gradwire",
        help="Data-parallel training over slow networks by compressing gradients.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in COMMANDS:
        command.register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {gradwire.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Holds the options of `gradwire` itself."""
