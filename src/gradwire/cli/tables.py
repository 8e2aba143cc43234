"""`gradwire tables`: print lookup tables of `thc`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gradwire.compressors.support.thc_tables import Table


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tables")(tables)


def tables(
    bits: Annotated[int, typer.Option(help="Bits of an index.")] = 4,
    granularity: Annotated[
        int | None, typer.Option(help="Largest value of the table. Default: chosen for --ranks.")
    ] = None,
    p: Annotated[float, typer.Option(help="Fraction of coordinates that are clipped.")] = 1 / 32,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks to choose the granularity for.")] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"table": [...], "cost": ...} instead of a table.')
    ] = False,
) -> None:
    """Print the optimal table of a granularity, or the table that `thc` uses for a number of ranks.

    The cost is the expected squared error of a standard normal coordinate that is not clipped, times the fraction of
    such coordinates. Tables are cached on disk.

    Example: gradwire tables --bits 4 --granularity 30 --p 0.03125 --json
    """
    from gradwire.compressors.support import thc_choice, thc_tables

    if granularity is None:
        thc_tables.check(bits, thc_tables.MAX_GRANULARITY, p)
        chosen = thc_choice.choose(ranks, bits, p).table
        bits, granularity = chosen.bits, chosen.granularity
    found = thc_tables.stored(bits, granularity, p)
    if as_json:
        typer.echo(json.dumps({"table": list(found.values), "cost": found.cost}))
        return
    _show(found, ranks)
    typer.echo(f"Cached in {thc_tables.cached(bits, granularity, p)}")


def _show(found: Table, ranks: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    from gradwire.compressors.support import thc_choice

    even = [round(z * found.granularity / (len(found.values) - 1)) for z in range(len(found.values))]
    shown = RichTable(
        box=box.SIMPLE_HEAD,
        title=f"{found.bits} bits, granularity {found.granularity}, p = {found.p:.4g}, clip at ±{found.threshold:.4f}",
    )
    for title in ("index", "value", "step", "at", "evenly"):
        shown.add_column(title, justify="right")
    last = 0
    for index, value in enumerate(found.values):
        at = (2 * value / found.granularity - 1) * found.threshold
        shown.add_row(str(index), str(value), f"+{value - last}" if index else "", f"{at:+.4f}", str(even[index]))
        last = value
    console = Console()
    console.print(shown)
    accumulator = thc_choice.accumulator_for(ranks, found.granularity)
    console.print(
        f"cost {found.cost:.7f}; accumulators of {8 * accumulator.itemsize} bits at {ranks} ranks", highlight=False
    )
