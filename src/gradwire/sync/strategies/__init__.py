"""Strategies: each turns an item into a graph of the five primitives.

Adding one is a file with a function `build(builder)` and a line in `STRATEGIES`. `BUILDERS` has, too, what needs more
than the ranks.
"""

from collections.abc import Callable

from gradwire.sync.plan import SERVER
from gradwire.sync.strategies import allgather, hierarchical, ring, scatter_reduce, server
from gradwire.sync.strategies.builder import Builder, Surroundings

STRATEGIES: dict[str, Callable[[Builder], None]] = {
    "allgather": allgather.build,
    "hierarchical": hierarchical.build,
    "ring": ring.build,
    "scatter_reduce": scatter_reduce.build,
}

BUILDERS = STRATEGIES | {SERVER: server.build}

__all__ = ["BUILDERS", "STRATEGIES", "Builder", "Surroundings"]
