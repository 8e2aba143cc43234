"""`gradwire compressors`: what there is."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

SIZE = 1 << 20  # elements, for the figures of the table


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("compressors")(compressors)


def compressors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and no table.")] = False,
) -> None:
    """List the compressors: their options, bias, bytes and residuals.

    Bits an element are the most that a tensor of a million float32 elements can take.
    """
    rows = [_row(name) for name in _names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        bias = "exact" if row["exact"] else "unbiased" if row["unbiased"] else "biased"
        feedback = "error feedback" if row["default_feedback"] == "error" else "no residuals"
        summable = ", summable" if row["summable"] else ""
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        bits = f"{row['max_bits']:.2f}"
        typer.echo(f"{row['name']:8} at most {bits:>5} bits an element, {bias}, {feedback}{summable}")
        typer.echo(f"{'':8} {row['summary']}")
        if options:
            typer.echo(f"{'':8} options: {options}")


def _names() -> list[str]:
    from gradwire.compressors import names

    return names()


def _row(name: str) -> dict[str, Any]:
    from gradwire.compressors import describe
    from gradwire.core.spec import TensorSpec

    found = describe(name)
    codec = found.default
    return {
        "name": name,
        "summary": found.summary,
        "options": found.options,
        "max_bits": codec.max_encoded_bytes(TensorSpec((SIZE,))) * 8 / SIZE,
        "exact": codec.exact,
        "unbiased": codec.unbiased,
        "summable": codec.summable,
        "default_feedback": codec.default_feedback,
    }
