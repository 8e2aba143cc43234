"""The simulation of THC's figures: what is free is never slower, and rows become tables and pictures."""

from dataclasses import replace

import pytest
import torch
from benchmarks.papers.thc import simulated

from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Cluster, Compute, SimulatedLink, SimulatedModel, models, step

pytestmark = pytest.mark.ci


def line(slope):
    return LinearCost(0.0, slope)


def known():
    codec = CodecCosts(line(1e-9), line(5e-10), line(5e-10), line(0.5))
    summed = CodecCosts(
        line(1e-9), line(5e-10), line(5e-10), line(0.5),
        stats=line(1e-10), stats_bytes=line(4e-3), accumulate=line(1e-10), finalize=line(3e-10),
        accumulator_bytes=line(1.0),
    )  # fmt: skip
    scaled = replace(codec, stats=line(1e-10), stats_bytes=LinearCost(4.0, 0.0))
    codecs = {"none": codec, simulated.THC: summed, **dict.fromkeys(simulated.RIVALS, codec), "terngrad": scaled}
    return Costs(1, (LinkCosts(0.0, 0.0),), codecs, add=line(2e-10), task=1e-5, frame=LinearCost(1e-5, 1e-10))


def constants():
    found = {("server tcp", 8192): 26e-6, ("server tcp", 61_440): 49e-6, ("rank tcp", 8192): 30e-6}
    found |= {("rank tcp", 61_440): 50e-6, ("server udp", 1024): 18e-6, ("rank udp", 1024): 30e-6}
    found[("server xdp", 1024)] = 1e-6
    return [simulated._constant(*key, value) for key, value in found.items()]


@pytest.fixture(scope="module")
def rows():
    packets = simulated.Packets.of(constants())
    assert packets.python(61_440) == pytest.approx(49e-6)
    return [*constants(), *simulated.simulated("12", "resnet50", known(), packets)]


def test_bounds_are_bounds(rows):
    for (rate,), found in simulated._by(rows, "rate"):
        seconds = {row["method"]: row["value"] for row in found}
        assert len(seconds) == 14
        assert seconds["DDP fp16"] <= seconds["DDP fp32"]
        assert seconds["thc, co-located, all free"] <= seconds["thc, co-located"] * 1.001, rate
        free = seconds["thc, XDP on bridge, ranks' packets free"]
        assert seconds["thc, in the switch, all free"] <= free * 1.001 <= seconds["thc, XDP on bridge"] * 1.002
        assert seconds["thc, Python, link W times"] <= seconds["thc, Python"] * 1.001
        assert min(seconds.values()) >= found[0]["compute_seconds"]


def test_ddp_has_the_buckets_of_the_other_methods():
    model = SimulatedModel.of(models.get("resnet50"), Compute(0.05, 0.1), simulated.BUCKET_BYTES)
    cluster = Cluster(4, SimulatedLink(1e9))
    native = simulated.ddp(model, cluster, torch.float32)
    ours = step(model, "none", cluster, known())
    assert {job.ready_seconds for job in native.jobs} == {job.ready_seconds for job in ours.jobs}


def test_rows_are_shown_and_drawn_as_simulated(rows, tmp_path):
    text = simulated.table(rows)
    assert "figure 12, 10gbit: simulated" in text
    assert "rank udp" in text
    pytest.importorskip("matplotlib")
    simulated.plot(rows, tmp_path)
    assert "Simulated with measured constants" in (tmp_path / "thc-simulated-12.svg").read_text()
