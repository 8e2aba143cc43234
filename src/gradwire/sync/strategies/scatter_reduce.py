"""Scatter-reduce: each range has an owner, which merges all ranks' payloads and sends the encoded mean back.

HiPress's parameter servers, co-located with the workers. Two encodes on the path of each element: a rank's own
gradient (local residual) and the owner's aggregate (aggregate residual). The owner's own part needs no encode at all.
Each rank sends 2 (W − 1)/W of a payload.

Source: HiPress (SOSP 2021), sections 2.3 and 6.1 (co-located servers). Differences: the owner merges its own gradient
in full precision, which costs nothing and halves no residual.
"""

# Shapes: W = ranks, K = partitions of a rank's share.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

SCATTER, GATHER = 0, 1  # stages


def build(builder: Builder) -> None:
    item, rank, world_size = builder.item, builder.rank, builder.world_size
    parts = item.parts(world_size * item.entry.partitions)
    # Owners rotate from tensor to tensor, so that short ranges do not always spare the same rank; and each rank
    # begins with the range behind its own, so that not all send to one owner at once.
    for step in range(1, len(parts) + 1):
        part = parts[(rank + step - item.tensor) % len(parts)]
        owner = (part.index + item.tensor) % world_size
        if part.count == 0:
            continue
        if owner != rank:
            mine = builder.start(part, "encode scatter")
            builder.send(mine, owner, part, SCATTER, "send scatter")
            mean = builder.recv(owner, part, GATHER, "recv gather")
            builder.decode(part, mean, GATHER, "decode gather", after=[mine])
        else:
            theirs = [builder.recv(peer, part, SCATTER, "recv scatter") for peer in builder.peers]
            mean = builder.merge(part, theirs, GATHER, "merge scatter")
            for peer in builder.peers:
                builder.send(mean, peer, part, GATHER, "send gather")
            builder.decode(part, mean, GATHER, "decode gather")


register(Strategy("scatter_reduce", build))
