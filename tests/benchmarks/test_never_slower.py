"""Verdicts over runs in turns, of hand-made records."""

import pytest
from benchmarks.accuracy.time_to_accuracy import Task
from benchmarks.planning.never_slower import AGAIN, MADE_BY, RANKS, Verdict, cell, table, verdicts
from benchmarks.planning.turns import MIN_TURNS
from rich.progress import Progress

from gradwire.bench.job import BenchmarkJob, Segment
from gradwire.bench.launch import launch

RUNS = 6


def rows(steps, workload="text", rate="100mbit"):
    """The last rival has a second copy, which is as fast unless `steps` has another."""
    if not any(name.endswith(AGAIN) for name in steps):
        steps = steps | {f"{list(steps)[-1]}{AGAIN}": list(steps.values())[-1]}
    return [
        {"workload": workload, "rate": rate, "method": method, "run": run, "value": 1.0, "mean": seconds}
        for run in range(RUNS)
        for method, seconds in ((name, each[run]) for name, each in steps.items())
    ]


def test_a_method_is_compared_with_the_better_rival_run_by_run():
    found = Verdict.of(rows({"auto": [1, 2, 1, 2, 1, 1], "ddp-fp32": [9] * RUNS, "ddp-fp16": [2, 4, 2, 4, 1, 3]}))
    assert (found.rival, found.rival_step, found.step) == ("ddp-fp16", 2.5, 1)
    assert found.mean == pytest.approx((2, 0.664), abs=1e-3)  # 2.571 / 6 ** 0.5 times a deviation of 0.632
    assert (found.ratio, found.worst) == (2, 1)  # 2, 2, 2, 2, 1, 3: a slow moment of both does not count
    assert found.control == (1, 1)


@pytest.mark.parametrize(("slower", "holds"), [(1.005, True), (1.02, False)])
def test_a_steady_rival_allows_one_percent(slower, holds):
    assert Verdict.of(rows({"auto": [slower] * RUNS, "ddp-fp32": [1.0] * RUNS})).holds == holds


@pytest.mark.parametrize(("again", "holds"), [(1.0, False), (1.08, True)])
def test_a_second_copy_of_the_rival_in_the_same_runs_is_the_control(again, holds):
    jobs = [1, 1, 1, 2, 2, 2]  # the second job is slower, for all methods
    steps = {"auto": [1.05 * each for each in jobs], "ddp-fp16": jobs, "ddp-fp32": [9] * RUNS}
    found = Verdict.of(rows({**steps, f"ddp-fp16{AGAIN}": [again * each for each in jobs]}))
    assert (found.rival, found.holds) == ("ddp-fp16", holds)
    assert found.control == pytest.approx((1 / again, 1 / again))


def test_the_table_has_a_line_for_each_cell_and_counts_those_that_hold():
    fast, slow = {"auto": [1.0] * RUNS, "ddp-fp32": [2.0] * RUNS}, {"auto": [2.0] * RUNS, "ddp-fp32": [1.0] * RUNS}
    record = rows(fast) + rows(slow, workload="deep", rate="none")
    assert [(each.workload, each.rate, each.holds) for each in verdicts(record)] == [
        ("text", "100mbit", True), ("deep", "none", False),
    ]  # fmt: skip
    text = table(record)
    assert "| text | 100 Mb/s | DDP fp32 | 2000.0 | 1000.0 | 2.00 | 2.000 ± 0.000 | 2.00 | 1.00 to 1.00 |  |" in text
    assert (
        "| deep | unshaped | DDP fp32 | 1000.0 | 2000.0 | 0.50 | 0.500 ± 0.000 | 0.50 | 1.00 to 1.00 | slower |" in text
    )
    assert text.endswith("`auto` is not slower in 1 of 2 cells.")


def test_a_run_has_the_mean_of_its_steps():
    """Some of the steps of `auto` take longer, which a median, the rows' `value`, does not see."""
    found = Verdict.of(rows({"auto": [1.25] * RUNS, "ddp-fp32": [1.0] * RUNS}))
    assert (found.ratio, found.holds) == (0.8, False)


def test_text_is_that_of_the_command():
    assert Task.of("text", None, MADE_BY).made_by == "text"


@pytest.mark.ci
def test_the_methods_of_a_run_are_timed_in_turns():
    segments = tuple(Segment(method, timed_seconds=0.1) for method in ("int8", "ddp-fp32", "int8"))
    job = BenchmarkJob("digits", segments, folder="", replay=True)
    outcomes = launch(job, 2, module="benchmarks.planning.turns")
    assert sorted((each.segment, each.rank) for each in outcomes) == [(at, rank) for at in range(3) for rank in (0, 1)]
    sent = {}
    for each in outcomes:
        (timed,) = each.timed
        assert len(timed.seconds) % MIN_TURNS == 0 and min(timed.seconds) > 0
        sent[each.segment] = timed.sent_bytes / len(timed.seconds)
    assert 3 * sent[0] < sent[1] and sent[2] == pytest.approx(sent[0], rel=0.01)


@pytest.mark.ci
@pytest.mark.root
def test_each_run_of_a_cell_has_all_methods_and_the_rival_twice():
    methods, runs = ("int8", "ddp-fp32"), 2
    found = cell(Task.of("digits", None, MADE_BY), "100mbit", methods, runs, 0.1, Progress(disable=True))
    first = [*methods, f"ddp-fp32{AGAIN}"]
    second = [*first[1:], first[0]]  # another one is made first
    assert [(row["method"], row["run"]) for row in found] == [
        (method, run) for run, order in enumerate((first, second)) for method in order
    ]
    assert {row["ranks"] for row in found} == {RANKS} and min(row["mean"] for row in found) > 0
    sent = {row["method"]: row["bytes"] for row in found}
    assert all(row["bytes"] == pytest.approx(sent[row["method"]], rel=0.1) for row in found)  # also in another order
    assert 3 * sent["int8"] < sent["ddp-fp32"]
    assert Verdict.of(found).rival == "ddp-fp32"
