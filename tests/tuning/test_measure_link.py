"""The link probe: one set of figures on all ranks, of a link whose rate is known."""

from __future__ import annotations

import sys

import pytest

from gradwire.lab import Lab
from gradwire.sync.plan import Plan
from gradwire.tuning.measure_link import measure_links
from tests.sync.harness import ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_hold_the_same_figures(world_size: int) -> None:
    with ranks(world_size, Plan("none")) as group:
        found = group.each(measure_links)
        again = group.each(measure_links)
    for links in (found, again):
        assert all(each == links[0] for each in links)
        assert len(links[0].between) == world_size and links[0].within is None
        assert all(0 < link.latency < 1 and 0 < link.seconds_per_byte < 1e-6 for link in links[0].between)


@pytest.mark.parametrize(("nodes", "measured"), [
    (2, {(0, 2), (1, 3), (0, 1), (2, 3)}),  # between nodes, and within each
    (["a", "b", "b", "b"], {(0, 1), (1, 2), (2, 3), (0, 3)}),  # of different sizes: one ring
    (4, {(0, 1), (1, 2), (2, 3), (0, 3)}),  # one node
])  # fmt: skip
def test_links_between_nodes_are_measured_apart_from_those_within(nodes, measured) -> None:
    with ranks(4, Plan("none"), nodes=nodes) as group:
        before = [list(one._engine.transport.sent_bytes) for one in group.synchronizers]
        found = group.each(measure_links)
        after = [list(one._engine.transport.sent_bytes) for one in group.synchronizers]
    sent = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    # A train has at least eight frames of 64 KiB; the figures that all ranks exchange are a few bytes.
    busy = {tuple(sorted((rank, peer))) for rank, row in enumerate(sent) for peer, count in enumerate(row)
            if count > 8 * 32_768}  # fmt: skip
    assert busy == measured
    assert all(each == found[0] for each in found)
    assert (found[0].within is not None) == (nodes == 2)


def test_a_group_of_one_has_no_link() -> None:
    with ranks(1, Plan("none")) as group:
        (link,) = measure_links(group.synchronizers[0]).between
    assert link(1000) == 0


JOB = """
import torch.distributed as dist
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.measure_link import measure_links
dist.init_process_group("gloo")
one = Synchronizer(None, "none")
print("bits a second", *(8 / link.seconds_per_byte for link in measure_links(one).between))
print("busy", one.link_busy_seconds())
one.close()
dist.destroy_process_group()
"""


@pytest.mark.root
def test_in_the_lab_it_finds_the_rate_of_the_link() -> None:
    lines: list[str] = []
    with Lab(2, "100mbit") as lab:
        lab.run([sys.executable, "-c", JOB], on_line=lambda host, stream, line: lines.append(line))
    found = [float(rate) for line in lines if line.startswith("bits") for rate in line.split()[3:]]
    assert len(found) == 4
    assert all(7e7 < rate < 1.3e8 for rate in found), found  # within 30 %, on a busy machine, too
    busy = [float(line.split()[1]) for line in lines if line.startswith("busy")]
    assert len(busy) == 2
    assert all(0.05 < seconds < 5 for seconds in busy), busy  # of about a megabyte at 100 Mb/s
