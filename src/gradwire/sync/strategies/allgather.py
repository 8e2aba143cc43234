"""All-gather: every rank sends its payload to every other rank, and sums all payloads.

Each rank encodes once, and no aggregate is encoded, so there are only local residuals. Each rank sends W − 1 payloads.
Use it for two ranks and for very sparse payloads.

Source: HiPress (SOSP 2021), section 2.3, after Horovod's sparse all-reduce.
"""

# Shapes: W = ranks.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

GATHER = 0  # the only stage


def build(builder: Builder) -> None:
    for chunk in builder.chunks():
        mine = builder.start(chunk, "encode gather")
        payloads = {builder.rank: mine}
        for peer in builder.peers:
            builder.send(mine, peer, chunk, GATHER, "send gather")
            payloads[peer] = builder.recv(peer, chunk, GATHER, "recv gather")
        builder.decode_sum(chunk, [payloads[rank] for rank in range(builder.world_size)], "decode gather")


register(Strategy("allgather", build, has_owners=False))
