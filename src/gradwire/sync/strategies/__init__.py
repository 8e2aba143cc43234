"""Strategies: each turns a job into operations of the five primitives.

A strategy is a module with a function `build(builder)` that registers itself on import. Strategies between ranks are in
this package. A strategy that needs a server is in the package of the server. Strategies outside of this package are
listed in `gradwire._REGISTERED`, and exist only after `gradwire.Plan`, `gradwire.Synchronizer` or `gradwire.attach` was
used: importing this package alone does not load them.
"""

from gradwire.sync.strategies import allgather, hierarchical, ring, scatter_reduce, sparse_reduce
from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import STRATEGIES, Strategy, operations_of, peer_strategies, register

__all__ = [
    "STRATEGIES",
    "Builder",
    "Strategy",
    "allgather",
    "hierarchical",
    "operations_of",
    "peer_strategies",
    "register",
    "ring",
    "scatter_reduce",
    "sparse_reduce",
]
