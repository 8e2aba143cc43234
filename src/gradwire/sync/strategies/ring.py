"""Ring: chunks travel around the ranks, each of which adds its gradient; then the mean travels around once more.

In the first round, each hop decodes, merges and encodes, with one aggregate residual per hop. The residual of the first
hop is local. With summable compressors, a hop only adds integers. In the second round, payloads are forwarded as they
are. Each rank talks to two neighbors and sends 2 (W − 1)/W of a payload.

Source: HiPress (SOSP 2021), section 2.3, after ring all-reduce.
"""

# Shapes: W = ranks.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register


def build(builder: Builder) -> None:
    rank, world_size = builder.rank, builder.world_size
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    last = world_size - 1  # the hop, and the stage, at which a chunk's sum is complete
    for owner, chunk in reversed(builder.owned_chunks()):  # a rank begins with the chunks that start there
        hop = (rank - owner) % world_size
        # Round one: the chunk starts at its owner and collects a gradient at each of W − 1 hops.
        if hop == 0:
            mine = builder.start(chunk, "encode ring")
        else:
            partial = builder.recv(previous, chunk, hop - 1, "recv ring")
            mine = builder.merge(chunk, [partial], hop, "merge ring")
        if hop == last:
            mean, distance = mine, 0
        else:
            builder.send(mine, following, chunk, hop, "send ring")
            # Round two: the mean comes from the rank that completed it, `distance` hops before this one.
            distance = hop + 1
            mean = builder.recv(previous, chunk, last + distance - 1, "recv mean")
        if distance < last:
            builder.send(mean, following, chunk, last + distance, "send mean")
        builder.decode(chunk, mean, last, "decode mean", after=[mine])


register(Strategy("ring", build, shows_mismatch=True))
