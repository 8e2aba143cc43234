"""Scatter-reduce: each chunk has an owner, which merges the payloads of all ranks and sends the encoded mean back.

This is HiPress's parameter server, co-located with the workers. Each element is encoded twice: as a rank's gradient
(local residual) and in the owner's aggregate (aggregate residual). The owner's own gradient is not encoded before it is
added. Each rank sends 2 (W − 1)/W of a payload, as a mean over tensors: with K chunks, K ranks own one.

Source: HiPress (SOSP 2021), sections 2.3 and 6.1 (co-located servers). Differences: the owner merges its own gradient
in full precision, which costs nothing.
"""

# Shapes: W = ranks.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

SCATTER, GATHER = 0, 1  # stages


def build(builder: Builder) -> None:
    for owner, chunk in builder.owned_chunks():
        if owner != builder.rank:
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


register(Strategy("scatter_reduce", build, shows_mismatch=True, merges_once=True))
