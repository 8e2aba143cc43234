"""Time to equal accuracy: goals of hand-made curves, the table, and trainings that resume."""

import math
import tempfile

import pytest
from benchmarks.accuracy import compared, summary
from benchmarks.accuracy import time_to_accuracy as benchmark
from benchmarks.keys import key_of
from benchmarks.options import listed

from benchmarks import runner
from gradwire.bench import methods
from gradwire.bench.records import read_figures, write_figures
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError
from tests.bench.support import plan_text

EVERY = 10


def curve(*losses):
    return [(EVERY * (at + 1), loss) for at, loss in enumerate(losses)]


def trained(method, seed, losses, accuracy=0.5):
    """The rows of one training."""
    fixed = {"workload": "text", "method": method, "seed": seed, "steps": EVERY * len(losses)}
    validations = [(step, loss, accuracy) for step, loss in curve(*losses)]
    return [{**fixed, **row} for row in benchmark.curve_figures([1.0] * fixed["steps"], validations)]


def timed(method, seconds, rate="100mbit", plan=None):
    fixed = {"workload": "text", "method": method, "rate": rate}
    rows = [{**fixed, "metric": "step", "value": seconds, "unit": "s"}]
    return rows + ([{**fixed, "metric": "settled", "plan": plan}] if plan else [])


# Three equal losses in a row are their own mean. DDP ends at 1.0 and 1.1 in step 40: the goal is 1.05 + 2 · 0.0707.
DENSE = [[2.0, 1.0, 1.0, 1.0], [2.0, 1.1, 1.1, 1.1]]


@pytest.fixture
def rows():
    found = []
    for seed, losses in enumerate(DENSE):
        found += trained("ddp-fp32", seed, losses)
        found += trained("int8", seed, [2.0, 2.0, 2.0, 0.6 - seed])  # the means of the last three are 1.53 and 1.2
        found += trained("onebit", seed, [2.0, 2.0, 2.0, 2.0])
        found += trained("plan:" + "0" * 8, seed, [0.5] * 4)
    return found


def test_losses_are_smoothed_over_three_validations():
    assert summary.smoothed(curve(4.0, 2.0, 3.0, 1.0)) == [(10, 4.0), (20, 3.0), (30, 3.0), (40, 2.0)]
    assert summary.smoothed([]) == []


def test_the_goal_is_above_the_mean_by_the_spread_between_seeds():
    assert summary.goal_of([curve(3.0, 1.0)]) == 1.0
    assert summary.goal_of([curve(0.5, 1.0), curve(9.0, 1.0)]) == 1.0
    assert summary.goal_of([curve(1.0), curve(2.0), curve(3.0)]) == 4.0  # a standard deviation of 1


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ((2.0, 1.0, 0.9), 20),  # the goal itself counts
        ((2.0, 0.9, 1.1, 0.9), 40),  # from there on it stays
        ((2.0, 0.9, 1.1), None),
        ((0.5, 0.5), 10),
        ((0.5, math.nan), None),
        ((math.nan, 0.5), 20),
    ],
)
def test_a_goal_is_reached_where_the_loss_stays_at_or_below_it(losses, step):
    assert summary.reached(curve(*losses), 1.0) == step


def test_steps_of_a_warm_up_count_with_the_time_of_their_ratio():
    assert compared.phases("dgc:ratio=0.001:warmup=8/momentum", 20) == [
        (2, "dgc:ratio=0.25/momentum"),
        (2, "dgc:ratio=0.0625/momentum"),
        (2, "dgc:ratio=0.015625/momentum"),
        (2, "dgc:ratio=0.00390625/momentum"),
        (12, "dgc/momentum"),
    ]
    for method in ("ddp-fp32", "auto", "int8", "topk:ratio=0.01/momentum", "plan:abc"):
        assert compared.phases(method, 20) == [(20, method)]
    rows = [row for _, method in compared.phases("dgc:warmup=8", 20) for row in timed(method, 1.0)]
    rows += timed("dgc:ratio=0.25", 5.0)
    found = summary.Findings.of(rows + trained("ddp-fp32", 0, [1.0, 1.0]), "text")
    assert found.seconds_to("dgc:warmup=8", "100mbit", 3) == 11.0
    assert found.seconds_to("dgc:warmup=8", "100mbit", 20) == 28.0
    assert found.seconds_to("dgc:warmup=8", "1gbit", 20) is None


def test_what_a_training_sends_beyond_its_replay_counts_with_the_time_of_the_link():
    def sending(metric, method, nbytes, **fields):
        return [{"workload": "text", "method": method, "metric": metric, "value": nbytes, "steps": 20, **fields}]

    rows = trained("ddp-fp32", 0, [1.0, 1.0]) + timed("threelc", 1.0) + timed("threelc", 0.5, "1gbit")
    rows += sending("bytes", "threelc", 2e6, rate="100mbit") + sending("bytes", "threelc", 4e6, rate="1gbit")
    rows += sending("training_bytes", "threelc", 2e6) + sending("training_bytes", "threelc", 4e6, seed=1)
    found = summary.Findings.of(rows, "text")
    assert found.seconds_to("threelc", "100mbit", 10) == pytest.approx(10 * (1.0 + 0.08))  # a further MB at 100 Mb/s
    assert found.seconds_to("threelc", "1gbit", 10) == 5.0, "fewer bytes make no step shorter"


@pytest.mark.parametrize("has_momentum", [True, False])
def test_every_method_can_be_trained_and_timed(has_momentum):
    found = [compared.method_of(label, 100, has_momentum) for label in compared.METHODS]
    methods.check(list(dict.fromkeys(found)))
    assert listed(",".join(compared.METHODS), ()) == list(compared.METHODS), "as --methods takes them"
    for method in found:
        assert sum(count for count, _ in compared.phases(method, 100)) == 100
        methods.check([timed for _, timed in compared.phases(method, 100)])
    assert ("dgc:ratio=0.001:warmup=10/momentum" in found) == has_momentum
    assert compared.method_of("onebit/momentum", 100, False) == "onebit/momentum"


def cells(text, method):
    """The cells of a method's line."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {method} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_says_who_gets_there_when_and_how_much_sooner(rows, tmp_path):
    path = tmp_path / "record.csv"
    # DDP is there after 40 steps of 3 s in both seeds: its first loss is part of the mean until then.
    write_figures("t", rows + timed("ddp-fp32", 3.0) + timed("int8", 1.0) + timed("onebit", 0.1), path)
    text = benchmark.table(read_figures(path))
    assert "1.1914: that of DDP fp32 after 40 steps, plus two standard deviations of its 2 seeds." in text
    assert cells(text, "DDP fp32") == [
        "1.0500 ± 0.6353", "", "50.00 ± 0.00", "40 ± 0", "3,000", "2.0 ± 0.0", "1", "",
    ]  # fmt: skip
    assert cells(text, "`int8`")[3:] == ["not reached", "1,000", "", "", ""]
    assert cells(text, "`onebit`")[0] == "2.0000 ± 0.0000"
    assert "plan" not in text


def test_some_seeds_that_get_there_have_no_mean(rows):
    rows += trained("topk", 0, [1.0] * 4) + trained("topk", 1, [2.0] * 4)
    rows += trained("thc", 0, [1.0] * 4) + trained("thc", 1, [1.0] * 4)
    rows += timed("ddp-fp32", 3.0) + timed("topk", 1.0) + timed("thc", 0.5)
    text = benchmark.table(rows)
    assert cells(text, "`topk`")[3:] == ["1 of 2 seeds", "1,000", "", "", ""]
    assert cells(text, "`thc`")[3:7] == ["10 ± 0", "500", "0.1 ± 0.0", "24.00 ± 0.00"]  # 120 s over 5 s


def test_auto_has_the_curve_of_what_it_settled_on_at_a_rate(rows):
    plan = plan_text(["0.weight"])
    name = compared.trained_as(plan)
    rows += trained(name, 0, [0.9] * 4) + trained(name, 1, [0.9] * 4)
    rows += timed("ddp-fp32", 3.0) + timed("ddp-fp32", 0.5, "1gbit")
    rows += timed("auto", 1.0, plan=plan) + timed("auto", 0.7, "1gbit", plan="ddp-fp32")
    slow, fast = benchmark.table(rows).split("\n\ntext at 1 Gb/s")
    assert cells(slow, f"`auto`: {name}")[6] == "12.00 ± 0.00"
    # The same steps as DDP's own, which were timed with the best of several bucket sizes.
    assert cells(fast, "`auto`: DDP fp32")[3:7] == ["40 ± 0", "500", "0.3 ± 0.0", "1.00 ± 0.00"]


def test_the_seconds_in_which_auto_decides_count(rows):
    plan = plan_text(["0.weight"])
    name = compared.trained_as(plan)
    rows += trained(name, 0, [0.9] * 4) + trained(name, 1, [0.9] * 4)
    rows += timed("ddp-fp32", 3.0) + timed("auto", 1.0, plan=plan)
    rows.append({"workload": "text", "method": "auto", "rate": "100mbit", "metric": "settling", "value": 20.0})
    found = cells(benchmark.table(rows), f"`auto`: {name}")
    assert found[4:7] == ["1,000", "0.5 ± 0.0", "4.00 ± 0.00"]  # 10 steps in 10 s after 20 s; DDP's 40 take 120 s


def test_a_goal_of_one_standard_deviation_names_who_still_gets_there(rows):
    rows += trained("topk", 0, [1.15] * 4) + trained("topk", 1, [1.15] * 4)  # DDP: 1.05, deviation 0.0707
    rows += trained("thc", 0, [1.12] * 4) + trained("thc", 1, [1.12] * 4)
    rows += timed("ddp-fp32", 3.0) + timed("topk", 1.0) + timed("thc", 1.0)
    text = benchmark.table(rows)
    assert cells(text, "`topk`")[3] == cells(text, "`thc`")[3] == "10 ± 0"
    assert "That is 13.5 % above it. With one, all seeds reach it of: `thc`." in text


def test_plans_that_choose_the_same_are_one_training(rows):
    plan = plan_text(["0.weight"])
    assert compared.trained_as(plan) == compared.trained_as(plan.replace("0.001", "0.002"))
    assert compared.trained_as(plan) != compared.trained_as(plan_text(["0.weight"], "onebit"))
    rows += timed("auto", 1.0, plan=plan) + timed("auto", 1.0, "1gbit", plan="ddp-fp16")
    task = benchmark.Task("text", "text", 8, False)
    found = benchmark.trainings([task], ["ddp-fp32", "ddp-fp16", "auto"], 2, 100, rows)
    named = ["ddp-fp32", "ddp-fp16", compared.trained_as(plan)]
    assert [(each.seed, each.method) for each in found] == [(seed, name) for seed in (0, 1) for name in named]
    assert [bool(each.plan) for each in found[:3]] == [False, False, True]


def test_a_part_of_a_record_says_what_is_missing(rows):
    assert benchmark.table(rows) == "text: There is no table before ddp-fp32 is timed."
    assert benchmark.table(timed("int8", 1.0)) == "text: There is no table before ddp-fp32 is trained."


def test_the_plots_name_every_method(rows, tmp_path):
    pytest.importorskip("matplotlib")
    rows += timed("ddp-fp32", 3.0) + timed("int8", 1.0) + timed("onebit", 0.1)
    benchmark.plot(rows, tmp_path)
    for name in ("loss-by-time-text.svg", "time-to-accuracy.svg"):
        drawn = (tmp_path / name).read_text()
        assert all(f"<!-- {word} -->" in drawn for word in ("int8", "onebit"))


def test_text_is_the_model_of_the_library_in_smaller_batches_without_a_folder():
    task = benchmark.Task.of("text", None)
    assert (task.num_parameters, task.has_momentum) == (6_317_857, False)
    assert make_workload(task.made_by).batch(0, 0, 1, 4).inputs.shape == (64, 24)


def test_images_need_a_folder():
    with pytest.raises(OptionError, match=r"Pass --data FOLDER"):
        benchmark.Task.of("vision", None)


def test_images_have_half_the_width_and_height_and_the_model_takes_them(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    for split in ("train", "test"):
        for label, level in (("cat", 0), ("dog", 255)):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(1000):  # validation takes every image of 2,000
                image.new("RGB", (32, 32), (level,) * 3).save(tmp_path / split / label / f"{number}.jpg")
    task = benchmark.Task.of("vision", tmp_path)
    assert task.has_momentum
    workload = make_workload(task.made_by)
    for samples in (workload.batch(0, 0, 1, 4), workload.validation()):
        assert samples.inputs.shape == (len(samples.targets), 3, 16, 16)
    dogs = samples.inputs[samples.targets == 1]
    assert len(dogs) == 1000 and dogs.min() > 1.9  # normalized white
    assert workload.model()(samples.inputs[:2]).shape == (2, 10)


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs the benchmark with two ranks on a small workload; returns the rows of its file."""
    monkeypatch.setattr(benchmark, "RANKS", 2)
    monkeypatch.setattr(benchmark, "BUCKETS_MB", (25.0,))
    path = tmp_path / "trial.csv"

    def call(methods, **options):
        fixed = {
            "data": None, "workloads": "digits", "seeds": 1, "parts": "", "minutes": math.inf, "steps": 6, "every": 2,
            "seconds": 0.05, "loopback": True,
        }  # fmt: skip
        runner.execute(benchmark, benchmark.NAME, path, None, methods=methods, **(fixed | options))
        return read_figures(path) if path.exists() else []

    call.path = path
    return call


@pytest.mark.ci
def test_trainings_resume_and_are_not_repeated(execute):
    names = [name for name, _ in make_workload("digits").model().named_parameters()]
    plan = plan_text(names)
    known = [{**row, "workload": "digits"} for row in timed("auto", 1.0, plan=" ".join(plan.split()))]
    write_figures(benchmark.NAME, [{**row, "date": "earlier"} for row in known], execute.path)
    assert len(execute("ddp-fp32", parts="learn", minutes=0.0)) == len(known)
    first = execute("ddp-fp32", parts="learn")
    assert [row["step"] for row in first if row["metric"] == "validation_loss"] == [2, 4, 6]
    losses = [row for row in first if row["metric"] == "validation_loss"]
    assert all(0 < row["accuracy"] < 1 and row["training_loss"] > 0 for row in losses)
    assert losses[-1]["value"] < losses[0]["value"]
    (sent,) = [row["value"] for row in first if row["metric"] == "training_bytes"]
    size = benchmark.Task.of("digits", None).num_parameters
    assert sent == pytest.approx(4 * size, rel=0.02), "an all-reduce of two ranks sends each gradient once, per step"
    write_figures(benchmark.NAME, [{**row, "date": "earlier"} for row in first], execute.path)
    then = execute("ddp-fp32,auto", parts="learn")
    assert {row["method"] for row in then if row["date"] != "earlier"} == {compared.trained_as(plan)}
    assert [row for row in then if row["date"] == "earlier"] == read_figures(execute.path)[: len(first)]
    assert {key_of(row, benchmark.KEY)[:2] for row in then} == {
        ("digits", method) for method in ("auto", "ddp-fp32", compared.trained_as(plan))
    }


@pytest.mark.ci
def test_methods_are_timed_in_one_recording_and_auto_says_what_it_settled_on(execute):
    found = execute("dgc:warmup=4,auto", parts="time")
    timed = {method for _, method in compared.phases("dgc:warmup=4", 6)} | {"auto"}
    for metric in ("step", "ideal_step", "bytes", "step_without_communication"):
        of_metric = {(row["method"], row["rate"]) for row in found if row["metric"] == metric}
        assert of_metric == {(method, rate) for method in timed for rate in benchmark.RATES}
    assert len({row["value"] for row in found if row["metric"] == "step_without_communication"}) == 1
    plans = compared.settled(found, "digits", "auto")
    assert set(plans) == set(benchmark.RATES)
    task = benchmark.Task.of("digits", None)
    assert benchmark.trainings([task], ["auto"], 1, 6, found)
    assert execute("auto", parts="time") == found
    more = execute("int8", parts="time")
    assert {row["method"] for row in more} == {*timed, "int8"}
    assert len({row["value"] for row in more if row["metric"] == "step_without_communication"}) == 1
