"""Sparse-reduce: each rank owns the positions that a hash gives it, adds the pairs of all ranks there, and sends sums.

For compressors whose payloads list (position, value) pairs. Each rank encodes once, splits its pairs by owner, and
sends each owner its part. An owner adds the parts of all ranks in rank order and sends the sum to all, in float32 and
without another encoding: there are only local residuals, and the mean has the bits of an all-gather's. Owners have
equally many pairs wherever these are, because positions are hashed, with a new function in each step.

With K pairs on each rank and U different positions on all, a rank receives about K + U pairs, (W − 1)/W of which come
from other ranks. An all-gather receives (W − 1) K. So it gains where positions overlap: U is between K and W K. With
two ranks, or without overlap, all-gather sends less.

Source: Wang et al. 2025 (ZEN, OSDI), "balanced parallelism" with hash bitmaps. Differences: a rank sends the list or
the bitmap of the owner's positions, whichever is shorter, in both directions; ZEN's bitmaps are those of the sums.
ZEN's hierarchical hashing, which keeps thousands of GPU threads from writing to the same place, is a counting sort
here. Positions are hashed in rows; see `gradwire.kernels.reference.owners`.
"""

# Shapes: W = ranks, K = pairs of a rank, U = different positions of all ranks.

from __future__ import annotations

from gradwire.sync.sparse_codec import sparse_codec_of
from gradwire.sync.strategies.builder import Builder
from gradwire.sync.strategies.register import Strategy, register
from gradwire.wire.frame import FrameKind

SCATTER, GATHER = 0, 1  # stages of frames


def build(builder: Builder) -> None:
    rank, ranks = builder.rank, range(builder.world_size)
    for chunk in builder.chunks():
        mine = builder.start(chunk, "encode scatter")
        parts = {rank: mine}
        for distance, peer in enumerate(builder.peers, 1):
            part = builder.add("encode", "part", "encode part", chunk, [mine], (), distance, FrameKind.PAYLOAD)
            builder.send_frame(part, peer, FrameKind.PAYLOAD, chunk, SCATTER, "send scatter")
            parts[peer] = builder.recv_frame(peer, FrameKind.PAYLOAD, chunk, SCATTER, "recv scatter")
        taken = [parts[each] for each in ranks]
        total = builder.add("merge", "sum_parts", "merge scatter", chunk, taken, (), GATHER, FrameKind.AGGREGATE)
        sums = {rank: total}
        for peer in builder.peers:
            builder.send_frame(total, peer, FrameKind.AGGREGATE, chunk, GATHER, "send gather")
            sums[peer] = builder.recv_frame(peer, FrameKind.AGGREGATE, chunk, GATHER, "recv gather")
        builder.add("decode", "decode_sums", "decode gather", chunk, [sums[each] for each in ranks], (), GATHER)


register(
    Strategy(
        "sparse_reduce",
        build,
        codec=sparse_codec_of,
        has_owners=False,
        sparse=True,
        carried_advice='It is for compressors that list pairs, such as "topk" or "dgc". Use "scatter_reduce" or '
        '"allgather".',
    )
)
