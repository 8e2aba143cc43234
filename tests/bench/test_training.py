"""Real processes that train the small workload."""

import json
import math
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench.job import BenchmarkJob, Segment, SegmentOutcome, TimedSteps
from gradwire.bench.launch import RanksError, launch
from gradwire.bench.replay import with_full_names, without_learning
from gradwire.bench.training import TrainingOptions, _method, run, segments_of
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import GradwireError, OptionError
from gradwire.ddp.momentum import may_have_momentum
from gradwire.planner import PlanTable
from tests.bench.support import plan_text

METHODS = ("ddp-fp32", "ddp-fp16", "threelc")


def small(**options):
    fixed = {"workload": "digits", "methods": METHODS, "ranks": 2, "steps": 15, "timed_seconds": 0.1, "lab": False}
    return TrainingOptions(**(fixed | options))


@pytest.mark.ci
def test_methods_train_alike_on_loopback():
    seen = []
    result = run(small(), lambda segment, progress: seen.append((segment.method, progress.phase)))
    assert [entry.method for entry in result.results] == list(METHODS)
    assert not result.shaped
    assert "predicted" in result.note
    for entry in result.results:
        assert len(entry.losses) == 15
        assert entry.losses[-1] < entry.losses[0]
        assert entry.identical
        assert entry.times[0].step.median > 0
        # The same model on the same data: the first loss comes before any gradient.
        assert entry.losses[0] == result.results[0].losses[0]
    ddp, fp16, ours = (entry.times[0] for entry in result.results)
    assert (ddp.ratio, fp16.ratio) == (1, 2)
    assert ours.ratio > 4
    assert not ours.measured
    assert {("threelc", "train"), ("threelc", "timed"), ("no-communication", "timed")} <= set(seen)
    json.dumps(result.as_dict())


@pytest.mark.ci
def test_torchs_powersgd_hook_sends_what_it_is_said_to_send():
    result = run(small(methods=("ddp-fp32", "ddp-powersgd", "powersgd"), steps=5))
    dense, hook, ours = (entry.times[0] for entry in result.results)
    assert result.results[1].identical
    # Both send the same factors. The hook's are all-reduced by rings, as DDP's gradients are.
    assert hook.bytes < dense.bytes
    assert 0.5 < hook.bytes / ours.bytes < 2


@pytest.mark.ci
def test_validation_along_the_way_and_momentum_correction():
    result = run(small(methods=("dgc:ratio=0.1/momentum",), validate_every=5, steps=10))
    (entry,) = result.results
    assert [step for step, _, _ in entry.validations] == [5, 10]
    assert entry.validations[-1][1:] == (entry.validation_loss, entry.validation_accuracy)
    assert entry.identical
    assert entry.losses[-1] < entry.losses[0]


@pytest.mark.ci
def test_a_recorded_backward_is_replayed():
    result = run(small(replay=True, steps=0, buckets_mb=(25.0,)))
    assert result.replayed
    ddp, _, ours = result.results
    assert ours.times[0].bytes < ddp.times[0].bytes
    assert all(entry.identical and entry.losses == [] for entry in result.results)
    assert all(math.isfinite(entry.times[0].step.median) for entry in result.results)


@pytest.mark.ci
@pytest.mark.parametrize("replay", [False, True])
def test_a_plan_from_a_file_synchronizes_a_training_and_its_replay(tmp_path, replay):
    path = tmp_path / "plan.json"
    names = [name for name, _ in make_workload("digits").model().named_parameters()]
    path.write_text(plan_text(names))
    result = run(small(methods=(f"plan:{path}",), steps=0 if replay else 5, replay=replay, buckets_mb=(25.0,)))
    (entry,) = result.results
    assert entry.identical
    assert entry.times[0].ratio > 3  # of int8


def test_a_replay_keeps_the_momentum_of_the_workload_and_learns_nothing():
    workload = make_workload("digits")
    model = workload.model()
    optimizer = without_learning(workload.optimizer(model))
    assert may_have_momentum([optimizer])
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_plan_from_a_replay_has_the_names_of_the_model():
    flat = TimedSteps(None, [0.1], 1, 1, 0.0, 0.0, settled=plan_text(["0/weight", "layers/1/bias"]))
    assert [row.name for row in PlanTable.from_json(with_full_names(flat).settled).rows] == [
        "0.weight",
        "layers.1.bias",
    ]
    for settled in (None, "ddp-fp16"):
        assert with_full_names(replace(flat, settled=settled)).settled == settled


@pytest.mark.ci
@pytest.mark.root
def test_in_the_lab_the_interface_agrees_with_our_count():
    result = run(small(methods=("ddp-fp32", "int8"), rates=("20mbit",), lab=True, buckets_mb=(25.0,)))
    assert result.shaped
    for entry in result.results:
        time = entry.times[0]
        assert time.measured
        assert abs(time.interface_difference) < 0.05
        # Bytes that have passed a shaped link have taken at least this long, less what its bucket lets through.
        assert time.step.median > 0.5 * time.ideal


@pytest.mark.parametrize("at", [0, 1])
def test_ranks_that_differ_with_any_bucket_size_are_told(at):
    segments = [Segment("none", size) for size in (4.0, 25.0)]
    outcomes = [
        [SegmentOutcome(index, rank, identical=index != at, timed=[TimedSteps(None, [0.1], 1, 1, 0.0, 0.0)])
         for rank in range(2)]
        for index in range(2)
    ]  # fmt: skip
    assert not _method("none", segments, outcomes, 0.1, measured=False).identical


def test_a_rank_that_fails_ends_the_run_with_its_words():
    job = BenchmarkJob("no-such-workload", (Segment("none"),), folder="")
    with pytest.raises(RanksError, match="Unknown workload 'no-such-workload'"):
        launch(job, 2)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the deadline alone ends orphans")
def test_ranks_do_not_outlive_a_parent_that_is_killed():
    code = (
        "from gradwire.bench.job import BenchmarkJob, Progress, Segment\n"
        "from gradwire.bench.launch import launch\n"
        "segments = (Segment('ddp-fp32', train_steps=10_000_000),)\n"
        "job = BenchmarkJob('digits', segments, folder='', deadline_seconds=60.0)\n"
        "launch(job, 2, lambda message: print(message, flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with parent:
        assert b"Progress" in parent.stdout.readline()
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        ends = [os.pidfd_open(int(child)) for child in children]
        parent.kill()
    assert len(ends) == 2
    for end in ends:
        with os.fdopen(end):
            assert select.select([end], [], [], 20.0)[0], "a rank lives on"


@pytest.mark.parametrize("seconds", [1.0, pytest.param(6.0, marks=pytest.mark.ci)])
def test_the_deadline_ends_the_run(seconds):
    job = BenchmarkJob("digits", (Segment("ddp-fp32", train_steps=10_000_000),), folder="", deadline_seconds=seconds)
    with pytest.raises(RanksError, match=r"time limit|failed first"):
        launch(job, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1},
        {"steps": 0},
        {"methods": ()},
        {"methods": ("ddp-fp32", "no-communication")},
        {"rates": ()},
        {"rates": ("1mbps",)},
        {"methods": ("gcomp",), "replay": True},
    ],
)
def test_options_that_cannot_be_run_are_refused(options):
    with pytest.raises(OptionError):
        run(small(**options))


def test_only_the_rivals_have_the_best_of_several_bucket_sizes():
    made = segments_of(small(methods=("ddp-fp32", "auto", "int8"), buckets_mb=(4.0, 25.0)))
    tried = {
        method: [each.bucket_mb for each in made if each.method == method] for method in ("ddp-fp32", "auto", "int8")
    }
    assert tried == {"ddp-fp32": [4.0, 25.0], "auto": [4.0], "int8": [4.0]}


@pytest.mark.ci
def test_the_demo_writes_its_report(tmp_path):
    from gradwire.cli.app import build_app

    line = ["demo", "--hosts", "2", "--steps", "4", "--workload", "digits", "--loopback", "--json"]
    line += ["--methods", "ddp-fp32,topk:ratio=0.1", "--out", str(tmp_path)]
    answer = CliRunner().invoke(build_app(), line)
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["results"][1]["label"] == "gradwire topk ratio 0.1"
    assert "gradwire topk ratio 0.1" in (tmp_path / "index.html").read_text()


def test_kernels_are_timed_into_a_file(tmp_path):
    from gradwire.cli.app import build_app

    line = ["bench", "kernels", "--size", "1", "--repeats", "1", "--only", "abs_max", "--json"]
    answer = CliRunner().invoke(build_app(), [*line, "--csv", str(tmp_path / "kernels.csv")])
    assert answer.exit_code == 0, answer.output
    measured = json.loads(answer.stdout)["kernels"]
    assert measured
    assert all("abs_max" in row["kernel"] for row in measured)
    assert "fraction_of_copy" in (tmp_path / "kernels.csv").read_text()


def test_some_of_the_kernels_do_not_replace_the_record_of_all(tmp_path, monkeypatch):
    from gradwire.cli.app import build_app

    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(build_app(), ["bench", "kernels", "--size", "1", "--repeats", "1", "--only", "abs_max"])
    assert answer.exit_code == 0, answer.output
    assert list(tmp_path.iterdir()) == []


def test_the_demo_refuses_unknown_methods_before_anything_starts():
    from gradwire.cli.app import build_app

    with pytest.raises(GradwireError, match="Did you mean 'topk'"):
        CliRunner().invoke(build_app(), ["demo", "--methods", "topkk"], catch_exceptions=False)
