"""Scatter-reduce: each chunk has an owner, which merges the payloads of all ranks and sends the encoded mean back.

This is HiPress's parameter server, co-located with the workers. Each element is encoded twice: as a rank's gradient
(local residual) and in the owner's aggregate (aggregate residual). The owner's own gradient is not encoded before it is
added. Each rank sends 2 (W − 1)/W of a payload.

Source: HiPress (SOSP 2021), sections 2.3 and 6.1 (co-located servers). Differences: the owner merges its own gradient
in full precision, which costs nothing.
"""

# Shapes: W = ranks.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

SCATTER, GATHER = 0, 1  # stages


def build(builder: Builder) -> None:
    rank, world_size = builder.rank, builder.world_size
    chunks = builder.chunks(world_size)
    # Owners rotate from tensor to tensor, so that short chunks do not always spare the same rank. Each rank begins with
    # the chunk after its own, so that not all ranks send to the same owner first.
    for step in range(1, len(chunks) + 1):
        chunk = chunks[(rank + step - builder.layout.tensor) % len(chunks)]
        owner = (chunk.index + builder.layout.tensor) % world_size
        if chunk.count == 0:
            continue
        if owner != rank:
            mine = builder.start(chunk, "encode scatter")
            builder.send(mine, owner, chunk, SCATTER, "send scatter")
            mean = builder.recv(owner, chunk, GATHER, "recv gather")
            builder.decode(chunk, mean, GATHER, "decode gather", after=[mine])
        else:
            theirs = [builder.recv(peer, chunk, SCATTER, "recv scatter") for peer in builder.peers]
            mean = builder.merge(chunk, theirs, GATHER, "merge scatter")
            for peer in builder.peers:
                builder.send(mean, peer, chunk, GATHER, "send gather")
            builder.decode(chunk, mean, GATHER, "decode gather")


register(Strategy("scatter_reduce", build))
