"""HiPress's table 7: which gradients to compress and in how many partitions, by its equations and by our planner.

The paper states the link (100 Gb/s), the ratio of onebit (1/32) and the counts of section 6.1. It gives no speed for
onebit, only that CompLL encodes TBQ 12 times as fast as 38.2 ms for 256 MB and decodes as fast: 84 GB/s, used here for
both. It gives no fixed times. Two are derived from table 7 itself, as those with which the equations reproduce most of
it: a minimum of `KERNEL` for each kernel, and of `MESSAGE` for each message.

The planner's entries are computed three times: with these constants, with at most one partition per node, and that with
the published constants alone.

Source: HiPress (SOSP 2021), table 7, section 6.1 and section 4.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.papers.hipress.equations import Choice, Hardware, Topology, choose, fewest
from gradwire.planner.closed_forms import route
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, Curve, LinearCost

MB = 1 << 20  # as in the paper's table 6
RATE = 100e9 / 8  # bytes a second
RATIO = 1 / 32
CODEC_RATE = 256 * MB / (38.2e-3 / 12)  # bytes of gradient a second
KERNEL, MESSAGE = 20e-6, 5e-6  # seconds; see `fits`
MAX_BATCHES = 4  # partitions per node that are tried, by either
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


ONE_BATCH, UNFITTED = "planner up to a partition per node", "planner without fitted times"
BY = {"equations": "equations", "planner": "planner", ONE_BATCH: "up to N", UNFITTED: "unfitted"}
"""Origins of entries, and headings of their columns."""


class Cell(NamedTuple):
    """An entry of the table and its origin."""

    by: str
    topology: Topology
    nodes: int
    megabytes: int
    choice: Choice


def cells() -> list[Cell]:
    """Every entry, computed from the printed equations and from the planner's closed forms."""
    found = []
    for topology, nodes, megabytes in PUBLISHED:
        size = topology, megabytes * MB, nodes
        choices = {
            "equations": choose(hardware(KERNEL, MESSAGE), *size, max_batches=MAX_BATCHES, slack=SLACK),
            "planner": planned(*size, KERNEL, MESSAGE),
            ONE_BATCH: planned(*size, KERNEL, MESSAGE, max_batches=1),
            UNFITTED: planned(*size, kernel=0.0, message=0.0, max_batches=1),
        }
        found += [Cell(by, topology, nodes, megabytes, choice) for by, choice in choices.items()]
    return found


def hardware(kernel: float, message: float) -> Hardware:
    """The paper's hardware with these minimum times of a kernel and a message."""
    return Hardware(
        send=lambda nbytes: max(message, nbytes / RATE),
        encode=lambda nbytes: max(kernel, nbytes / CODEC_RATE),
        decode=lambda nbytes: max(kernel, nbytes / RATIO / CODEC_RATE),
        rate=RATIO,
    )


def planned(
    topology: Topology, nbytes: int, nodes: int, kernel: float, message: float, max_batches: int = MAX_BATCHES
) -> Choice:
    """Best choice by the closed forms for a strategy, with these minimum times of a kernel and a message."""
    even = kernel * CODEC_RATE / 4  # elements up to which a kernel takes its least time
    coding = (
        Curve(((1.0, kernel), (even, kernel), (2 * even, 2 * kernel))) if kernel else LinearCost(0.0, 4 / CODEC_RATE)
    )
    codecs = {
        "none": CodecCosts(FREE, FREE, FREE, LinearCost(0, 4)),
        "onebit": CodecCosts(coding, coding, coding, LinearCost(0, 4 * RATIO)),
    }
    costs = Costs(nodes, (LinkCosts(0.0, 1 / RATE, per_message=message),), codecs, frame_bytes=0.0)
    dense, compressed = (
        [(route(spec, STRATEGY[topology], count, nbytes // 4, costs).seconds, count)
         for count in range(1, max_batches * nodes + 1)]
        for spec in ("none", "onebit")
    )  # fmt: skip
    compress = min(compressed)[0] < min(dense)[0]
    seconds, partitions = fewest(compressed if compress else dense, SLACK)
    return Choice(compress, partitions, seconds, min(dense)[0])


class Fit(NamedTuple):
    """Number of decisions and of entries of table 7 that a pair of fixed times reproduces."""

    decisions: int
    entries: int
    by_planner: int
    kernel: float
    message: float


def fits() -> list[Fit]:
    """How many decisions and entries the equations reproduce, and entries the planner up to a partition per node."""
    found = []
    for kernel, message in itertools.product(
        (5e-6, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 1e-4), (1e-6, 5e-6, 1e-5, 2e-5, 5e-5)
    ):
        given = hardware(kernel, message)
        sizes = [(topology, megabytes * MB, nodes) for topology, nodes, megabytes in PUBLISHED]
        printed = [choose(given, *size, slack=SLACK) for size in sizes]
        ours = [planned(*size, kernel, message, max_batches=1) for size in sizes]
        decisions = sum(choice.compress == compress for choice, (compress, _) in zip(printed, PUBLISHED.values()))
        found.append(Fit(decisions, agreeing(printed), agreeing(ours), kernel, message))
    return sorted(found, reverse=True)


def agreeing(choices: Sequence[Choice]) -> int:
    """Number of entries that are those of the paper."""
    return sum((choice.compress, choice.partitions) == entry for choice, entry in zip(choices, PUBLISHED.values()))


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
    fit_times: Annotated[
        bool, typer.Option("--fit", help="Print how well each pair of fixed times fits the table.")
    ] = False,
) -> list[dict[str, Any]]:
    """Compute the table, or the fits."""
    if not fit_times:
        return list(figures(cells()))
    for fit in fits():
        times = f"kernel {1e6 * fit.kernel:4g} us, message {1e6 * fit.message:3g} us"
        equations = f"{fit.decisions} of 12 decisions, {fit.entries} of 12 entries by the equations"
        print(f"{times}: {equations}; {fit.by_planner} by the planner")
    return []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The paper's table and ours, in the paper's layout."""
    headings = "".join(heading.ljust(12) for heading in ("published", *BY.values()))
    lines = [f"{'':8}{'strategy':16}{'nodes':>6}  {headings}{'ms':>8}{'dense ms':>10}"]
    choices = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    hits = dict.fromkeys(BY, 0)
    for at in range(0, len(choices), len(BY)):
        entry = dict(zip(BY, choices[at : at + len(BY)]))
        ours = entry["planner"]
        published = [row["published"] for row in ours[:2]]
        found = {by: [row["value"] for row in choice[:2]] for by, choice in entry.items()}
        for by, pair in found.items():
            hits[by] += pair == published
        pairs = [published, *found.values()]
        shown = "".join(f"<{'yes' if compress else 'no'}, {count}>".ljust(12) for compress, count in pairs)
        times = f"{1e3 * ours[2]['value']:8.3g}{1e3 * ours[3]['value']:10.3g}"
        megabytes, strategy = ours[0]["size"] // MB, ours[0]["method"].split(", ")[2]
        lines.append(f"{megabytes:>4} MB {strategy:16}{ours[0]['ranks']:>6}  {shown}{times}")
    return "\n".join(
        [*lines, f"{'entries as published':44}" + "".join(str(count).ljust(12) for count in hits.values())]
    )
