"""Strategy "server": ranks send indices to a stand-alone aggregator, which looks them up, adds, and returns the sum.

Each rank encodes once, and no aggregate is encoded. Each rank sends one payload and receives one accumulator, however
many ranks there are. The same server reduces the statistics of the preliminary round.

Source: THC (Li et al. 2024), sections 3 and 6. Differences: the chunks of a tensor (`partitions`) form a pipeline, and
one tensor is encoded while others travel.
"""

from __future__ import annotations

from gradwire.aggregator.codec import ServedCodec
from gradwire.aggregator.service import ADDRESS_VARIABLE, Aggregator
from gradwire.compressors.base import LookupCompressor
from gradwire.sync.job import TensorJob
from gradwire.sync.runtime import Runtime
from gradwire.sync.strategies import Builder, Strategy, register
from gradwire.wire.frame import FrameKind

NAME = "server"


def build(builder: Builder) -> None:
    for chunk in builder.chunks():
        stats = builder.add("encode", "stats", "encode stats", chunk, frame=FrameKind.STATS)
        reduced = builder.add("send", "ask_stats", "send stats", chunk, [stats])
        known = builder.add("merge", "take_stats", "merge stats", chunk, [reduced])
        indices = builder.add("encode", "start", "encode indices", chunk, after=[known], frame=FrameKind.PAYLOAD)
        total = builder.add("send", "ask_sum", "send indices", chunk, [indices])
        builder.add("decode", "take", "decode mean", chunk, [total])


def codec_of(job: TensorJob, runtime: Runtime) -> ServedCodec:
    """Return the codec of a job that travels through the aggregator."""
    return ServedCodec(job, runtime.services[NAME], runtime)


register(
    Strategy(
        NAME,
        build,
        codec_of,
        has_owners=False,
        requires_full_tensor=True,
        carried=LookupCompressor,  # type: ignore[type-abstract]
        carried_advice=(
            'Its server looks indices up and adds: pass "thc" or "uthc", or choose a strategy between ranks, such as '
            '"scatter_reduce".'
        ),
        address=Aggregator.of,
        address_advice=(
            'Pass options=gradwire.SyncOptions(server="host:port") or set '
            f"{ADDRESS_VARIABLE}, and start the aggregator with gradwire serve --aggregate."
        ),
    )
)
