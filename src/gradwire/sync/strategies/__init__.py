"""Strategies: each turns a job into a graph of the five primitives.

A strategy is a file with a function `build(builder)` that registers itself. Those between ranks stand here. One that
needs a process besides the ranks stands in the room of that process.
"""

from gradwire.sync.strategies import allgather, hierarchical, ring, scatter_reduce
from gradwire.sync.strategies.builder import Builder, Runtime
from gradwire.sync.strategies.register import STRATEGIES, Strategy, peer_strategies, register

__all__ = [
    "STRATEGIES",
    "Builder",
    "Runtime",
    "Strategy",
    "allgather",
    "hierarchical",
    "peer_strategies",
    "register",
    "ring",
    "scatter_reduce",
]
