"""`gradwire graph`: print the task graph of a strategy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("graph")(graph)


def graph(
    strategy: Annotated[
        str, typer.Argument(metavar="STRATEGY", help="allgather, hierarchical, ring or scatter_reduce.")
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    rank: Annotated[int, typer.Option(help="Rank whose graph is printed.")] = 0,
    partitions: Annotated[int, typer.Option(help="Ranges that a rank's share of the tensor is cut into.")] = 1,
    compressor: Annotated[
        str, typer.Option(help="Name of a compressor. Summable compressors have other graphs.")
    ] = "onebit",
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node, for hierarchical.")] = 2,
    elements: Annotated[int, typer.Option(help="Elements of the tensor. 0 makes every range non-empty.")] = 0,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
) -> None:
    """Print the tasks of one rank for one tensor: primitives, peers and dependencies.

    Example: gradwire graph ring --ranks 4 --rank 1 --dot | dot -Tsvg > ring.svg
    """
    from gradwire.compressors import make
    from gradwire.sync import drawing
    from gradwire.sync.plan_entry import PlanEntry

    entry = PlanEntry(make(compressor), strategy, partitions)
    found = drawing.graph_of(entry, ranks, rank, ranks_per_node, elements)
    if dot:
        typer.echo(drawing.dot(found))
        return
    where = f" on nodes of {ranks_per_node}" if strategy == "hierarchical" else ""
    count = f"{partitions} partition{'s' * (partitions > 1)}"
    title = (
        f"{found.name}, {entry.compressor!r}, {ranks} ranks{where}, {count}: rank {rank} runs {len(found.tasks)} tasks"
    )
    typer.echo(f"{title}\n{drawing.table(found)}")
