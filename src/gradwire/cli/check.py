"""`gradwire check`: the contract suite over one compressor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.targets import Options, Target, codecs_of
from gradwire.core.errors import UnknownNameError

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor
    from gradwire.testing import Check

Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Run only this check. May be repeated.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("check")(check)


def check(target: Target, option: Options = None, only: Only = None) -> None:
    """Check a compressor against the contract that the synchronizer relies on.

    Prints one line per check: whether it passed, its time and its name. For a file, all its compressors are checked.
    The exit code is 1 if a check failed.

    Example: gradwire check my_compressors.py:mine --option bits=4
    """
    chosen = _chosen(only)
    given = "".join(f" --option {each}" for each in option or [])
    passed = [
        _passes(codec, chosen, f"gradwire check {name}{given}") for name, codec in codecs_of(target, option).items()
    ]
    raise typer.Exit(0 if all(passed) else 1)


def _passes(codec: Compressor, chosen: list[Check], again: str) -> bool:
    """Run the checks of one compressor and print the results."""
    from gradwire.testing import run

    outcomes = []
    typer.echo(repr(codec))
    for outcome in run(codec, chosen):
        outcomes.append(outcome)
        typer.echo(f"{'FAILED' if outcome.error else 'ok':6} {outcome.seconds:6.2f} s  {outcome.check.name}")
        if outcome.error:
            kind = "" if isinstance(outcome.error, AssertionError) else f"{type(outcome.error).__name__}: "
            typer.echo(f"       {outcome.check.summary}\n       {kind}{outcome.error}")
            typer.echo(f"       To repeat: {again} --only {outcome.check.name}")
    failed = sum(outcome.error is not None for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    typer.echo(
        f"{len(outcomes) - failed} passed, {failed} failed, {len(chosen) - len(outcomes)} do not apply, {seconds:.1f} s"
    )
    return not failed


def _chosen(only: list[str] | None) -> list[Check]:
    from gradwire.testing import CHECKS

    known = {each.name: each for each in CHECKS}
    for name in only or []:
        if name not in known:
            raise UnknownNameError("check", name, known)
    return [known[name] for name in only] if only else CHECKS
