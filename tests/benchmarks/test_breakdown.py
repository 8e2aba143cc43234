"""Figures of the breakdown, and its codec of torch operations compared with `onebit`."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.papers.hipress import breakdown, stages
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire as gw
from gradwire.bench.job import BenchmarkJob, Progress, Segment, SegmentOutcome, TimedSteps
from gradwire.bench.methods import DDP_FP32, SILENT
from gradwire.bench.rank import Rank
from gradwire.core.spec import TensorSpec

SECONDS = {SILENT: 0.1, "torch": 0.5, "generated": 0.4, "pipelined": 0.3, "bulk": 0.2, "planned": 0.1}


@pytest.fixture
def table():
    """One rank; the second bucket size is the better one of DDP's."""
    run = breakdown.segments(["1gbit"], 1.0)
    outcomes = []
    for index, segment in enumerate(run):
        seconds = {breakdown.BUCKET_MB: 0.7, breakdown.OTHER_BUCKET_MB: 0.6}.get(segment.bucket_mb)
        seconds = SECONDS.get(segment.method, seconds)
        outcomes.append(SegmentOutcome(index, 0, timed=[TimedSteps("1gbit", [seconds] * 3, 3, 9, 0.0, 0.0)]))
    assert {segment.method for segment in run} == {*SECONDS, DDP_FP32}
    return breakdown.stages(run, outcomes, ["1gbit"])


def test_each_stage_stands_beside_the_one_before(table):
    found = {stage.name: (stage.synchronization, stage.saved) for stage in table["1gbit"]}
    assert found["dense"] == (pytest.approx(0.5), None)
    assert found["torch"] == (pytest.approx(0.4), pytest.approx(0.2))
    assert found["planned"] == (0.0, pytest.approx(1.0))
    assert list(found) == ["dense", *breakdown.STAGES]


def test_figures_name_the_workload(table):
    rows = list(breakdown.figures("deep", table, {}))
    steps = [row["value"] for row in rows if row["metric"] == "step"]
    assert steps == [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert {row["workload"] for row in rows} == {"deep"}


@pytest.mark.ci
def test_stages_are_warmed_up_as_ddp_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        run, counts = (Segment(DDP_FP32, rates=()), Segment("bulk", rates=())), []
        run_segment = stages.runner(Rank(BenchmarkJob("digits", run, folder="", replay=True)))
        for index in range(2):
            steps.clear()
            run_segment(index)
            counts.append(len(steps))
    finally:
        hook.remove()
        dist.destroy_process_group()
    assert counts[0] == counts[1] > 1


def test_a_timed_step_is_no_plan():
    plans = breakdown.Plans()
    plans(Progress(0, "timed", 1, 5, rate="1gbit"))
    assert plans.found == {}


@pytest.mark.parametrize("size", [1, 7, 64, 1001])
def test_torch_operations_give_the_values_of_generated_code(size):
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size))
    context = gw.Context(name="w", spec=TensorSpec.of(grad))
    decoded, residuals = [], []
    for codec in (stages.TorchOnebit(), gw.make("onebit")):
        work = np.ones(size, np.float32)
        payload = codec.encode(grad, context, scale=0.25, residual_in=work, residual_out=work)
        assert payload.nbytes == gw.make("onebit").encode(grad, context).nbytes
        decoded.append(codec.decode(payload, context))
        residuals.append(torch.from_numpy(work))
    torch.testing.assert_close(*decoded)
    torch.testing.assert_close(*residuals)


def test_all_are_compressed_until_small_ones_are_batched():
    bias = TensorSpec((4,))
    entries = {stage: stages.how(stage).plan.entry("fc.bias", bias) for stage in breakdown.STAGES}
    names = {stage: entry.compressor.name for stage, entry in entries.items()}
    assert names == {
        "torch": "torch_onebit", "generated": "onebit", "pipelined": "onebit", "bulk": "none", "planned": "none",
    }  # fmt: skip
    assert [stage for stage, entry in entries.items() if entry.batched] == ["bulk", "planned"]


def test_bulk_leaves_tensors_below_1024_elements_dense():
    plan = stages.how("bulk").plan
    found = [plan.entry("fc.weight", TensorSpec(shape)).compressor.name for shape in ((31, 33), (32, 32))]
    assert found == ["none", "onebit"]
