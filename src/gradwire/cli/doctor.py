"""`gradwire doctor`: what this machine has for jobs, and what is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gradwire.cli.checks.finding import Finding

_MARKS = {"ok": ("✓", "green"), "note": ("–", "yellow"), "problem": ("✗", "bold red")}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    trial: Annotated[bool, typer.Option(help="Let two ranks average a tensor, which may compile kernels.")] = True,
) -> None:
    """Look for what a job needs: versions, compilers, kernel cache, rights and network. Changes nothing.

    Of what is missing it says what to do. The exit code is 0 if a job can run here, otherwise 1. Run it in the
    environment of the job, with its variables.

    Example: gradwire doctor
    """
    from gradwire.cli.checks import network, rights, software
    from gradwire.cli.checks import trial as trials
    from gradwire.cli.checks.finding import PROBLEM, run_check

    areas = {"software": software.CHECKS, "rights": rights.CHECKS, "network": network.CHECKS}
    if trial:
        areas["trial"] = trials.CHECKS
    found = {area: [each for check in checks for each in run_check(check)] for area, checks in areas.items()}
    can_run = not any(each.status == PROBLEM for findings in found.values() for each in findings)
    if as_json:
        rows = {area: [each._asdict() for each in findings] for area, findings in found.items()}
        typer.echo(json.dumps({"can_run": can_run, **rows}, indent=1))
    else:
        from rich.console import Console

        Console().print(page(found))
    raise typer.Exit(0 if can_run else 1)


def page(found: dict[str, list[Finding]]) -> RenderableType:
    """Return the findings by area, for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for area, findings in found.items():
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(width=18, overflow="fold")
        table.add_column(overflow="fold")
        for each in findings:
            mark, style = _MARKS[each.status]
            # Text, because names and messages of this machine are not markup.
            answer = Text(each.text)
            if each.advice:
                answer.append(f"\n→ {each.advice}", "cyan")
            table.add_row(Text(mark, style), Text(each.name), answer)
        parts += [Text(area, "bold"), table, Text()]
    problems = sum(each.status == "problem" for findings in found.values() for each in findings)
    notes = sum(each.status == "note" for findings in found.values() for each in findings)
    if problems:
        parts.append(Text(f"No job can run here: {problems} problem{'s' * (problems > 1)}, marked ✗.", "bold red"))
    else:
        rest = (
            f" {notes} thing{'s' * (notes > 1)} that it may not need {'are' if notes > 1 else 'is'} missing: –."
            * bool(notes)
        )
        parts.append(Text(f"A job can run here.{rest}", "bold green"))
    return Group(*parts)
