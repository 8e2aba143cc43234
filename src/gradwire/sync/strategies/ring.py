"""Ring: ranges travel round the ranks, each adding its gradient, then the mean goes round once more untouched.

In the first round each hop decodes, merges and encodes again, with an aggregate residual a hop (the first hop's is
local); for summable compressors a hop only adds integers. In the second round payloads are forwarded as they are.
Each rank talks to two neighbors and sends 2 (W − 1)/W of a payload.

Source: HiPress (SOSP 2021), section 2.3, after ring all-reduce.
"""

# Shapes: W = ranks, K = partitions of a rank's share.

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register


def build(builder: Builder) -> None:
    item, rank, world_size = builder.item, builder.rank, builder.world_size
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    parts = item.parts(world_size * item.entry.partitions)
    last = world_size - 1  # the hop, and the stage, at which a range's sum is complete
    for step in range(len(parts)):
        part = parts[(rank - step) % len(parts)]  # a rank begins with the range that starts at itself
        if part.count == 0:
            continue
        hop = (rank - part.index) % world_size
        # Round one: the range starts at rank (index mod W) and gathers a gradient at each of W − 1 hops.
        if hop == 0:
            mine = builder.start(part, "encode ring")
        else:
            partial = builder.recv(previous, part, hop - 1, "recv ring")
            mine = builder.merge(part, [partial], hop, "merge ring")
        if hop == last:
            mean, distance = mine, 0
        else:
            builder.send(mine, following, part, hop, "send ring")
            # Round two: the mean comes from the rank that completed it, `distance` hops before this one.
            distance = hop + 1
            mean = builder.recv(previous, part, last + distance - 1, "recv mean")
        if distance < last:
            builder.send(mean, following, part, last + distance, "send mean")
        builder.decode(part, mean, last, "decode mean", after=[mine])


register(Strategy("ring", build))
