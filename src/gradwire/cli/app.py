"""The one place where commands are registered."""

from __future__ import annotations

from typing import Annotated

import typer

import gradwire
from gradwire.cli import bench, check, compressors, demo, graph, lab, plan, probe, serve, show, simulate, tables

COMMANDS = (demo, lab, probe, bench, compressors, check, show, tables, graph, plan, simulate, serve)
"""Modules of commands, in the order of the help page. Each has `register(app: typer.Typer) -> None`."""


def build_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="gradwire",
        help="Train in data parallel over a slow link, never slower than without compression.",
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
    # A callback keeps `gradwire lab` a subcommand even while it is the only one.
    pass
