"""Server: every rank sends its indices to a stand-alone aggregator, which looks them up, adds, and sends the sum back.

One encode a rank and none of an aggregate. The statistics of the preliminary round are reduced by the same server.
Each rank sends one payload and receives one accumulator, however many ranks there are.

Source: THC (Li et al. 2024), sections 3 and 6. Differences: a tensor's ranges (`partitions`) pass one behind the other,
and one tensor is encoded while others travel.
"""

from __future__ import annotations

from gradwire.sync.strategies.builder import Builder


def build(builder: Builder) -> None:
    item = builder.item
    for part in item.parts(item.entry.partitions):
        if part.count == 0:
            continue
        mine = builder.start(part, "encode indices")
        total = builder.ask_sum(part, mine)
        builder.take(part, total, "decode mean")
