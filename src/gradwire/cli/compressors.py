"""`gradwire compressors`: list the compressors."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

SIZE = 1 << 20  # elements of the square matrix that the figures are for


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("compressors")(compressors)


def compressors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the compressors with their options, bias, size and residuals.

    Bits per element are the most that a tensor of a million float32 elements can take. Lines and functions are those of
    the encoder and decoder, for compressors written in the language.

    Example: gradwire compressors --json
    """
    from gradwire.compressors import names

    rows = [_row(name) for name in names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(_table(rows))
    else:
        for row in rows:
            typer.echo("\n".join(_lines(row)))


def _row(name: str) -> dict[str, Any]:
    from gradwire.compressors import describe
    from gradwire.compressors.base import SummableCompressor
    from gradwire.compressors.base.traced import TracedCompressor
    from gradwire.core.spec import TensorSpec
    from gradwire.lang.operators.base import used_operators

    found = describe(name)
    codec = found.default
    program = codec.program if isinstance(codec, TracedCompressor) else None
    return {
        "name": name,
        "summary": found.summary,
        "options": found.options,
        "max_bits": codec.max_encoded_bytes(TensorSpec((1 << 10, SIZE >> 10))) * 8 / SIZE,
        "exact": codec.exact,
        "unbiased": codec.unbiased,
        "summable": isinstance(codec, SummableCompressor),
        "default_feedback": codec.default_feedback,
        "lines": program and program.num_encode_lines + program.num_decode_lines,
        "functions": program and program.functions,
        "operators": program and used_operators(program),
    }


def _bias(row: dict[str, Any]) -> str:
    return "exact" if row["exact"] else "unbiased" if row["unbiased"] else "biased"


def _options(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row["options"].items())


def _lines(row: dict[str, Any]) -> list[str]:
    """A compressor as plain text."""
    feedback = "error feedback" if row["default_feedback"] == "error" else "no residuals"
    summable = ", summable" if row["summable"] else ""
    found = [
        f"{row['name']:9} at most {row['max_bits']:>5.2f} bits per element, {_bias(row)}, {feedback}{summable}",
        f"{'':9} {row['summary']}",
    ]
    if row["options"]:
        found.append(f"{'':9} options: {_options(row)}")
    if row["lines"]:
        functions = f"{row['functions']} function{'s' * (row['functions'] != 1)}"
        found.append(f"{'':9} {row['lines']} lines, {functions}: {', '.join(row['operators'])}")
    return found


def _table(rows: list[dict[str, Any]]) -> Table:
    """All compressors as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption="bits: most bits per element of a million. lines: in the language.")
    for title in ("name", "bits", "bias", "residuals", "options", "lines", "functions", "operators"):
        right = title in ("bits", "lines", "functions")
        table.add_column(title, justify="right" if right else "left", no_wrap=title == "name")
    for row in rows:
        table.add_row(
            row["name"], f"{row['max_bits']:.2f}", _bias(row), "yes" if row["default_feedback"] == "error" else "no",
            _options(row), str(row["lines"] or ""), "" if row["lines"] is None else str(row["functions"]),
            ", ".join(row["operators"] or ()),
        )  # fmt: skip
    return table
