"""`gradwire graph`: print the operations of a strategy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("graph")(graph)


def graph(
    strategy: Annotated[
        str, typer.Argument(metavar="STRATEGY", help="allgather, hierarchical, ring, scatter_reduce or sparse_reduce.")
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    rank: Annotated[int, typer.Option(help="Rank whose graph is printed.")] = 0,
    partitions: Annotated[
        int | None, typer.Option(help="Ranges that the tensor is cut into. Default: one per rank.")
    ] = None,
    compressor: Annotated[
        str, typer.Option(help="Name of a compressor. Summable compressors have other graphs.")
    ] = "onebit",
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node, for hierarchical.")] = 2,
    elements: Annotated[int, typer.Option(help="Elements of the tensor. 0 makes every range non-empty.")] = 0,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
) -> None:
    """Print the operations of one rank for one tensor: primitives, peers and dependencies.

    Example: gradwire graph ring --ranks 4 --rank 1 --dot | dot -Tsvg > ring.svg
    """
    from gradwire.compressors import make
    from gradwire.sync import drawing
    from gradwire.sync.plan_entry import PlanEntry

    entry = PlanEntry(make(compressor), strategy, partitions)
    found = drawing.operations_of_rank(entry, ranks, rank, ranks_per_node, elements)
    numel = sum(chunk.count for chunk in {op.chunk for op in found.ops})
    title = f"{strategy} of {numel:,} elements"
    if dot:
        typer.echo(drawing.dot(found, title))
        return
    where = f" on nodes of {ranks_per_node}" if strategy == "hierarchical" else ""
    count = len({op.chunk for op in found.ops})
    setting = f"{title}, {entry.compressor!r}, {ranks} ranks{where}, {count} partition{'s' * (count > 1)}"
    typer.echo(f"{setting}: rank {rank} runs {len(found.ops)} operations\n{drawing.table(found)}")
