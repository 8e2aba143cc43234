"""Hierarchical: dense within a node, compressed between nodes.

Each range has one owner on every node. The ranks of a node send their gradients of the range, dense, to their owner,
which adds them up. The owners of the range then run scatter-reduce among themselves with the node's sums for
gradients: compressed, a preliminary round and accumulators included, with residuals at the owners alone. Each owner
decodes the mean and sends it, dense, to the ranks of its node.

Between nodes 2 (M − 1) payloads travel in all, where scatter-reduce of all ranks sends 2 (W − L): L times as many for
nodes of L ranks. A range is lossy twice, however many ranks there are. On one node all is dense; with one rank a node
it is scatter-reduce.

Source: two-level all-reduce as in Horovod and NCCL; HiPress (SOSP 2021), section 5, "local aggregation". Differences:
every rank owns ranges and encodes them, not one leader a node; nodes may have different numbers of ranks, and a rank
of a smaller node then owns more.
"""

# Shapes: W = ranks, M = nodes, L = ranks of a node.

from __future__ import annotations

from gradwire.sync.job import Chunk
from gradwire.sync.nodes import Nodes
from gradwire.sync.strategies import scatter_reduce
from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

REDUCE, SCATTER, GATHER, SPREAD = range(4)  # stages
DENSE_STAGES = (REDUCE, SPREAD)  # within a node


def build(builder: Builder) -> None:
    item, rank, nodes = builder.item, builder.rank, builder.nodes
    if len(nodes) == builder.world_size:
        scatter_reduce.build(builder)
        return
    builder.encode_from(SCATTER, among=len(nodes))
    home = next(node for node in nodes if rank in node)
    parts = item.parts(builder.world_size * item.entry.partitions)
    for step in range(1, len(parts) + 1):  # in the order of scatter-reduce, for the same reasons
        part = parts[(rank + step - item.tensor) % len(parts)]
        if part.count == 0:
            continue
        merger = (part.index + item.tensor) % builder.world_size
        owners = owners_of(nodes, merger)
        owner = next(each for each in owners if each in home)
        if rank == owner:
            _own(builder, part, home, owners, merger)
            continue
        mine = builder.dense(part, "encode reduce")
        builder.send_dense(mine, owner, part, REDUCE, "send reduce")
        mean = builder.recv_dense(owner, part, SPREAD, "recv spread")
        builder.place(part, mean, "decode spread", after=[mine])


def owners_of(nodes: Nodes, merger: int) -> list[int]:
    """The owner on each node of the range that `merger` merges: the rank of the same place on its node."""
    place = next(node.index(merger) for node in nodes if merger in node)
    return sorted(node[place % len(node)] for node in nodes)


def _own(builder: Builder, part: Chunk, home: tuple[int, ...], owners: list[int], merger: int) -> None:
    """What an owner does: the node's sum, scatter-reduce among owners, and the mean for the node."""
    rank = builder.rank
    local = [peer for peer in home if peer != rank]
    builder.add_up(part, [builder.recv_dense(peer, part, REDUCE, "recv reduce") for peer in local], owners)
    if rank == merger:
        others = [peer for peer in owners if peer != rank]
        theirs = [builder.recv(peer, part, SCATTER, "recv scatter") for peer in others]
        mean = builder.merge(part, theirs, GATHER, "merge scatter")
        for peer in others:
            builder.send(mean, peer, part, GATHER, "send gather")
        decoded = builder.decode(part, mean, GATHER, "decode gather")
    else:
        mine = builder.start(part, "encode scatter")
        builder.send(mine, merger, part, SCATTER, "send scatter")
        mean = builder.recv(merger, part, GATHER, "recv gather")
        decoded = builder.decode(part, mean, GATHER, "decode gather", after=[mine])
    if local:
        spread = builder.spread(part, mean, decoded, "encode spread")
        for peer in local:
            builder.send_dense(spread, peer, part, SPREAD, "send spread")


register(Strategy("hierarchical", build))
