"""HiPress's table 7: which gradients to compress and in how many partitions, by its equations and by our planner.

The paper states the link (100 Gb/s), the ratio of onebit (1/32) and the counts of section 6.1. It gives no speed for
onebit, only that CompLL encodes TBQ 12 times as fast as 38.2 ms for 256 MB and decodes as fast: 84 GB/s, used here for
both. It gives no fixed times. Two are derived from table 7 itself, as those that reproduce most of its entries: a
minimum of `KERNEL` for each kernel, and of `MESSAGE` for each message.

Source: HiPress (SOSP 2021), table 7, section 6.1 and section 4.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.papers.hipress.equations import Choice, Hardware, Topology, choose, fewest
from gradwire.planner.choose import PARTITIONS
from gradwire.planner.closed_forms import route
from gradwire.planner.costs import FREE, CodecCosts, Costs, Curve, LinearCost, LinkCosts

MB = 1 << 20  # as in the paper's table 6
RATE = 100e9 / 8  # bytes a second
RATIO = 1 / 32
CODEC_RATE = 256 * MB / (38.2e-3 / 12)  # bytes of gradient a second
KERNEL, MESSAGE = 20e-6, 5e-6  # seconds; see `fits`
SLACK = 0.02  # the least number of partitions within so much of the best time, by either

# (topology, nodes, MB): whether to compress, partitions.
PUBLISHED: dict[tuple[Topology, int, int], tuple[bool, int]] = {
    ("ps_colocated", 4, 4): (True, 2), ("ps_colocated", 16, 4): (True, 1),
    ("ring", 4, 4): (True, 1), ("ring", 16, 4): (False, 16),
    ("ps_colocated", 4, 16): (True, 4), ("ps_colocated", 16, 16): (True, 6),
    ("ring", 4, 16): (True, 4), ("ring", 16, 16): (True, 5),
    ("ps_colocated", 4, 392): (True, 12), ("ps_colocated", 16, 392): (True, 16),
    ("ring", 4, 392): (True, 4), ("ring", 16, 392): (True, 16),
}  # fmt: skip
STRATEGY: dict[Topology, str] = {"ring": "ring", "ps_colocated": "scatter_reduce"}


class Cell(NamedTuple):
    """An entry of the table, its origin, and the paper's entry."""

    by: str
    topology: Topology
    nodes: int
    megabytes: int
    choice: Choice


def cells() -> list[Cell]:
    """Every entry, computed from the printed equations and from the planner's closed forms."""
    found = []
    for topology, nodes, megabytes in PUBLISHED:
        printed = choose(hardware(KERNEL, MESSAGE), topology, megabytes * MB, nodes, slack=SLACK)
        found.append(Cell("equations", topology, nodes, megabytes, printed))
        found.append(Cell("planner", topology, nodes, megabytes, planned(topology, megabytes * MB, nodes)))
    return found


def hardware(kernel: float, message: float) -> Hardware:
    """The paper's hardware with these minimum times of a kernel and a message."""
    return Hardware(
        send=lambda nbytes: max(message, nbytes / RATE),
        encode=lambda nbytes: max(kernel, nbytes / CODEC_RATE),
        decode=lambda nbytes: max(kernel, nbytes / RATIO / CODEC_RATE),
        rate=RATIO,
    )


def planned(topology: Topology, nbytes: int, nodes: int) -> Choice:
    """Best choice by the closed forms for a strategy. As in the paper, partitions are ranges of the whole gradient."""
    even = KERNEL * CODEC_RATE / 4  # elements up to which a kernel takes its least time
    coding = Curve(((1.0, KERNEL), (even, KERNEL), (2 * even, 2 * KERNEL)))
    codecs = {
        "none": CodecCosts(FREE, FREE, FREE, LinearCost(0, 4)),
        "onebit": CodecCosts(coding, coding, coding, LinearCost(0, 4 * RATIO)),
    }
    costs = Costs(nodes, (LinkCosts(0.0, 1 / RATE, per_message=MESSAGE),), codecs, frame_bytes=0.0)
    dense, compressed = (
        [(route(spec, STRATEGY[topology], count, nbytes // 4, costs).seconds, nodes * count) for count in PARTITIONS]
        for spec in ("none", "onebit")
    )
    compress = min(compressed)[0] < min(dense)[0]
    seconds, partitions = fewest(compressed if compress else dense, SLACK)
    return Choice(compress, partitions, seconds, min(dense)[0])


def fits() -> list[tuple[int, int, float, float]]:
    """Number of decisions and partition counts of table 7 that the equations reproduce, by kernel and message time."""
    found = []
    for kernel, message in itertools.product(
        (5e-6, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 1e-4), (1e-6, 5e-6, 1e-5, 2e-5, 5e-5)
    ):
        given = hardware(kernel, message)
        choices = [
            choose(given, topology, megabytes * MB, nodes, slack=SLACK) for topology, nodes, megabytes in PUBLISHED
        ]
        pairs = list(zip(choices, PUBLISHED.values()))
        decisions = sum(choice.compress == compress for choice, (compress, _) in pairs)
        both = sum((choice.compress, choice.partitions) == entry for choice, entry in pairs)
        found.append((decisions, both, kernel, message))
    return sorted(found, reverse=True)


def figures(found: list[Cell]) -> Iterator[dict[str, Any]]:
    """One line for each figure, with the paper's value."""
    for cell in found:
        compress, partitions = PUBLISHED[cell[1:4]]
        fixed = {
            "method": f"onebit, {cell.by}, {STRATEGY[cell.topology]}", "dtype": "float32", "ranks": cell.nodes,
            "size": cell.megabytes * MB, "rate": "100gbit", "source": "computed",
        }  # fmt: skip
        choice = cell.choice
        yield {**fixed, "metric": "compress", "value": int(choice.compress), "unit": "yes", "published": int(compress)}
        yield {**fixed, "metric": "partitions", "value": choice.partitions, "unit": "ranges", "published": partitions}
        yield {**fixed, "metric": "synchronization", "value": choice.seconds, "unit": "s"}
        yield {**fixed, "metric": "dense_synchronization", "value": choice.dense_seconds, "unit": "s"}


def run(
    fit: Annotated[bool, typer.Option("--fit", help="Print how well each pair of fixed times fits the table.")] = False,
) -> list[dict[str, Any]]:
    """Compute the table, or the fits."""
    if not fit:
        return list(figures(cells()))
    for decisions, both, kernel, message in fits():
        times = f"kernel {1e6 * kernel:4g} us, message {1e6 * message:3g} us"
        print(f"{times}: {decisions} of 12 decisions, {both} of 12 entries")
    return []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The paper's table and ours, in the paper's layout."""
    lines = [
        f"{'':8}{'strategy':16}{'nodes':>6}  {'published':12}{'equations':12}{'planner':12}{'ms':>8}{'dense ms':>10}"
    ]
    entries = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    for printed, ours in zip(entries[::2], entries[1::2]):
        pairs = [
            [row["published"] for row in printed[:2]],
            *([row["value"] for row in by[:2]] for by in (printed, ours)),
        ]
        shown = "".join(f"<{'yes' if compress else 'no'}, {count}>".ljust(12) for compress, count in pairs)
        times = f"{1e3 * ours[2]['value']:8.3g}{1e3 * ours[3]['value']:10.3g}"
        megabytes, strategy = ours[0]["size"] // MB, ours[0]["method"].split(", ")[2]
        lines.append(f"{megabytes:>4} MB {strategy:16}{ours[0]['ranks']:>6}  {shown}{times}")
    return "\n".join(lines)
