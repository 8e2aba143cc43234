"""All-gather: every rank sends its payload to every other and sums what it holds.

One encode a rank and no encode of an aggregate, so only local residuals. Each rank sends (W − 1) payloads; right for
two ranks and for very sparse payloads.

Source: HiPress (SOSP 2021), section 2.3, after Horovod's sparse all-reduce.
"""

# Shapes: W = ranks.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register

GATHER = 0  # the one stage


def build(builder: Builder) -> None:
    item = builder.item
    for part in item.parts(item.entry.partitions):
        if part.count == 0:
            continue
        mine = builder.start(part, "encode gather")
        messages = {builder.rank: mine}
        for peer in builder.peers:
            builder.send(mine, peer, part, GATHER, "send gather")
            messages[peer] = builder.recv(peer, part, GATHER, "recv gather")
        builder.decode_sum(part, [messages[rank] for rank in range(builder.world_size)], "decode gather")


register(Strategy("allgather", build))
