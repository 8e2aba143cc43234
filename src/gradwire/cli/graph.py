"""`gradwire graph`: print the task graph of a strategy."""

from __future__ import annotations

from typing import Annotated

import typer

Strategy = Annotated[str, typer.Argument(metavar="STRATEGY", help="allgather, hierarchical, ring or scatter_reduce.")]
Ranks = Annotated[int, typer.Option("--ranks", help="Number of ranks.")]
Rank = Annotated[int, typer.Option("--rank", help="Rank whose graph is printed.")]
Partitions = Annotated[int, typer.Option("--partitions", help="Ranges that a rank's share of the tensor is cut into.")]
Name = Annotated[
    str, typer.Option("--compressor", help="Name of a compressor. Summable compressors have other graphs.")
]
PerNode = Annotated[int, typer.Option("--ranks-per-node", help="Ranks of a node, for hierarchical.")]
Elements = Annotated[int, typer.Option("--elements", help="Elements of the tensor. 0 makes every range non-empty.")]
Dot = Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("graph")(graph)


def graph(
    strategy: Strategy,
    ranks: Ranks = 4,
    rank: Rank = 0,
    partitions: Partitions = 1,
    compressor: Name = "onebit",
    ranks_per_node: PerNode = 2,
    elements: Elements = 0,
    dot: Dot = False,
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
