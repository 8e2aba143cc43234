"""The ablation of a step: what its variants leave out, and its figures."""

import pytest
import torch
from benchmarks.papers.hipress import breakdown, step_ablation

import gradwire as gw
from gradwire.bench.job import SegmentOutcome, TimedSteps
from gradwire.bench.methods import DDP_FP32, SILENT
from gradwire.core.spec import TensorSpec

SECONDS = {
    SILENT: 0.1, DDP_FP32: 0.6, "all": 0.2, "without-batch-compression": 0.3, "without-fusion": 0.5, "two-threads": 0.1,
    "all-again": 0.2,
}  # fmt: skip


def test_each_variant_changes_one_part():
    parts = {}
    for variant in step_ablation.VARIANTS:
        how = step_ablation.how(variant)
        entry = how.plan.entry("fc.weight", TensorSpec((64, 64)))
        parts[variant] = entry.compressor.compiled() is not None, how.buckets, how.threads
        assert entry.feedback == "error"
        assert how.plan.entry("fc.bias", TensorSpec((64,))).compressor.name == "none"
    assert parts == {
        "all": (True, True, 1), "without-batch-compression": (False, True, 1), "without-fusion": (True, False, 1),
        "two-threads": (True, True, 2), "all-again": (True, True, 1),
    }  # fmt: skip


def test_the_compressor_without_batches_sends_the_same_bytes():
    grad = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    context = gw.Context(name="w", spec=TensorSpec.of(grad))
    codecs = step_ablation.one_by_one()(), gw.make("onebit")
    first, second = (codec.encode(grad, context).body.tobytes() for codec in codecs)
    assert first == second


def test_figures_compare_with_all_parts():
    ordered = breakdown.segments(["none"], 1.0, step_ablation.VARIANTS)
    outcomes = [
        SegmentOutcome(index, 0, timed=[TimedSteps("none", [SECONDS[segment.method]] * 3, 3, 9, 0.0, 0.0)])
        for index, segment in enumerate(ordered)
    ]
    rows = list(step_ablation.figures("deep", breakdown.step_times(ordered, outcomes, ["none"])))
    over = {row["method"]: row["value"] for row in rows if row["metric"] == "step_over_all"}
    assert over == pytest.approx(
        {
            "dense": 3.0,
            "all": 1.0,
            "without-batch-compression": 1.5,
            "without-fusion": 2.5,
            "two-threads": 0.5,
            "all-again": 1.0,
        }
    )
    assert "| deep, none, without-fusion | 500.0 | 500.0 to 500.0 | 2.50 | 0.0 | 0.00 |" in step_ablation.table(rows)
