"""The sweep of ratios and the ablation: run, read back and draw."""

import pytest
import torch
from benchmarks.papers.dragonn import ablation as sparse_ablation
from benchmarks.papers.dragonn import ratios as sparse_ratios
from benchmarks.papers.dragonn import stages as sparse_stages
from benchmarks.papers.hipress import breakdown

from gradwire.bench import methods
from gradwire.bench.job import SegmentOutcome, TimedSteps
from gradwire.bench.records import read_figures, write_figures
from gradwire.compressors import make
from gradwire.compressors.base.registry import unregister
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec


@pytest.fixture
def registered():
    sparse_stages.register_all()
    yield
    for name in ("dgc", "dragonn"):
        unregister(f"{name}_dense")


def test_workloads_have_short_names():
    names = ("text", "benchmarks.papers.dragonn.extreme_classification.Delicious=/data/delicious")
    assert [sparse_ablation.short(name) for name in names] == ["text", "extreme-classification"]


def test_ratios_are_read_back_and_drawn(tmp_path):
    methods.check(list(sparse_ratios.METHODS))
    path = tmp_path / "ratios.csv"
    rows = [
        {"method": method, "rate": rate, "metric": metric, "value": value}
        for method in sparse_ratios.METHODS
        for rate in ("100mbit", "1gbit")
        for metric, value in (("compression_ratio", 50.0), ("speedup", 4.0), ("step_over_ideal", 1.25))
    ]
    write_figures("replay", [*rows, {"method": "dgc:ratio=0.1", "metric": "bytes", "value": 1}], path)
    rows = read_figures(path)
    points = sparse_ratios.points_of(rows)
    assert points["qsgd:bits=4", "1gbit"] == (sparse_ratios.Point(0.02, 4.0, 1.25))
    assert "| `dragonn:ratio=0.001` | 2.000% | 4.00, 1.25 | 4.00, 1.25 |" in sparse_ratios.table(rows)
    pytest.importorskip("matplotlib")
    sparse_ratios.plot(rows, tmp_path)
    assert "qsgd" in (tmp_path / "sparse-ratios.svg").read_text()


def test_stages_switch_on_one_thing_after_the_other(registered):
    """For a matrix and a bias: compressor, how sums are decoded, and whether the planner decides."""
    found = {}
    for stage in sparse_stages.STAGES:
        how = sparse_stages.how(stage)
        entries = [how.plan.entry("w", TensorSpec((200, 200))), how.plan.entry("b", TensorSpec((200,)))]
        assert entries[0].strategy == "allgather"
        found[stage] = [entry.compressor.name for entry in entries] + [bool(how.chosen)]
    assert found == {
        "dgc": ["dgc_dense", "dgc_dense", False],
        "hashing": ["dragonn_dense", "dragonn_dense", False],
        "selection": ["dragonn_dense", "none", True],
        "sparse decoding": ["dragonn", "none", True],
    }


def test_decoding_densely_gives_the_same(registered):
    grads = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    ctxs = [Context("w", rank=rank, spec=TensorSpec((4000,))) for rank in range(3)]
    sums = []
    for name in ("dragonn", "dragonn_dense"):
        codec = make(name, ratio=0.01)
        payloads = [codec.encode(grad, ctx) for grad, ctx in zip(grads, ctxs)]
        sums.append(codec.decode_sum(payloads, ctxs, torch.empty(4000)))
    assert torch.equal(*sums)
    assert sums[0].any()


def test_synchronization_is_tabulated_by_stage(tmp_path):
    run = breakdown.segments(["1gbit"], 1.0, sparse_stages.STAGES)
    seconds = {breakdown.SILENT: 0.1, breakdown.DDP_FP32: 0.6, "dgc": 0.5, "hashing": 0.4, "selection": 0.3}
    outcomes = [
        SegmentOutcome(index, 0, timed=[TimedSteps("1gbit", [seconds.get(segment.method, 0.2)] * 3, 3, 9, 0.0, 0.0)])
        for index, segment in enumerate(run)
    ]
    found = breakdown.stages(run, outcomes, ["1gbit"])
    path = tmp_path / "sparse-ablation-text.csv"
    write_figures("sparse-ablation", breakdown.figures("text", found, {}), path)
    rows = read_figures(path)
    assert sparse_ablation.table(rows).endswith("| text, 1gbit | 500.0 | 400.0 | 300.0 | 200.0 | 100.0 |")
    pytest.importorskip("matplotlib")
    sparse_ablation.plot(rows, tmp_path)
    assert "sparse decoding" in (tmp_path / "sparse-ablation.svg").read_text()
