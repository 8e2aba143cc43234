"""Hierarchical: dense within a node, compressed between nodes.

Each chunk has one owner on every node. The ranks of a node send their gradients of the chunk, dense, to that owner,
which adds them. The owners of the chunk then run scatter-reduce among themselves on the sums of their nodes:
compressed, with preliminary rounds and accumulators, and with residuals at the owners only. Each owner decodes the mean
and sends it, dense, to the ranks of its node.

Between nodes, 2 (M − 1) payloads travel in total. Scatter-reduce of all ranks sends 2 (W − L), which is L times as many
for nodes of L ranks. Each element is encoded lossily twice, for any number of ranks. On one node, everything is dense.
With one rank per node, this is scatter-reduce.

Source: two-level all-reduce as in Horovod and NCCL; HiPress (SOSP 2021), section 5, "local aggregation". Differences:
every rank owns and encodes chunks, not one leader per node. Nodes may have different numbers of ranks; a rank of a
smaller node owns more.
"""

# Shapes: W = ranks, M = nodes, L = ranks of a node.

from __future__ import annotations

from gradwire.sync.chunk import Chunk
from gradwire.sync.nodes import Nodes
from gradwire.sync.strategies import scatter_reduce
from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

REDUCE, SCATTER, GATHER, SPREAD = range(4)  # stages
DENSE_STAGES = (REDUCE, SPREAD)  # within a node


def build(builder: Builder) -> None:
    rank, nodes = builder.rank, builder.nodes
    if len(nodes) == builder.world_size:
        scatter_reduce.build(builder)
        return
    builder.encode_from(SCATTER, num_encoders=len(nodes))
    home = next(node for node in nodes if rank in node)
    for merger, chunk in builder.owned_chunks():
        owners = owners_of(nodes, merger)
        owner = next(each for each in owners if each in home)
        if rank == owner:
            _build_owner(builder, chunk, home, owners, merger)
            continue
        mine = builder.encode_dense(chunk, "encode reduce")
        builder.send_dense(mine, owner, chunk, REDUCE, "send reduce")
        mean = builder.recv_dense(owner, chunk, SPREAD, "recv spread")
        builder.decode_dense(chunk, mean, "decode spread", after=[mine])


def owners_of(nodes: Nodes, merger: int) -> list[int]:
    """Return the owner on each node of the chunk that `merger` merges: the rank with the same index on its node."""
    index = next(node.index(merger) for node in nodes if merger in node)
    return sorted(node[index % len(node)] for node in nodes)


def _build_owner(builder: Builder, chunk: Chunk, home: tuple[int, ...], owners: list[int], merger: int) -> None:
    """Add an owner's tasks: the node's sum, scatter-reduce among owners, and the mean for the node."""
    rank = builder.rank
    local = [peer for peer in home if peer != rank]
    theirs = [builder.recv_dense(peer, chunk, REDUCE, "recv reduce") for peer in local]
    builder.merge_dense(chunk, theirs, owners, "merge reduce")
    if rank == merger:
        others = [peer for peer in owners if peer != rank]
        theirs = [builder.recv(peer, chunk, SCATTER, "recv scatter") for peer in others]
        mean = builder.merge(chunk, theirs, GATHER, "merge scatter")
        for peer in others:
            builder.send(mean, peer, chunk, GATHER, "send gather")
        decoded = builder.decode(chunk, mean, GATHER, "decode gather")
    else:
        mine = builder.start(chunk, "encode scatter")
        builder.send(mine, merger, chunk, SCATTER, "send scatter")
        mean = builder.recv(merger, chunk, GATHER, "recv gather")
        decoded = builder.decode(chunk, mean, GATHER, "decode gather", after=[mine])
    if local:
        dense_mean = builder.encode_mean(chunk, mean, decoded, "encode spread")
        for peer in local:
            builder.send_dense(dense_mean, peer, chunk, SPREAD, "send spread")


register(Strategy("hierarchical", build, merges_once=True))
