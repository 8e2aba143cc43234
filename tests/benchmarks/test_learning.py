"""The trainings of sparsifiers: data, methods, and figures computed from measurements."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.keys import key_of
from benchmarks.papers.dragonn import extreme_classification as extreme
from benchmarks.papers.dragonn import learning, vision
from torch import nn

from gradwire.bench import methods
from gradwire.bench.digits import Digits
from gradwire.bench.records import read_figures, write_figures
from gradwire.bench.workload import Samples, evaluate
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError
from gradwire.residuals import MomentumCorrection
from tests.bench.support import step_time

HEADER = "@relation r\n@attribute a {0,1}\n@data\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / extreme.TRAIN).write_text(HEADER + "{0 1,499 1,500 1,1482 1}\n" * 70 + "{3 1}\n")
    (tmp_path / extreme.TEST).write_text(HEADER + "{1 1,501 1}\n")
    return tmp_path


def rows(study):
    """The first design is dense; the second learns in as many steps, the third never, both ten times as fast."""
    found = []
    for index, design in enumerate(study.designs):
        for seed in range(learning.SEEDS):
            accuracy = (0.6 if index != 2 else 0.3) + 0.01 * (seed - 1) * (index != 1)
            validations = [(10, 1.0, 0.5), (20, 0.5, accuracy)]
            found += learning.learning_figures(design, seed, 8, [1.0] * 20, validations)
        time = step_time(1.0 if index == 0 else 0.1, 1e6)
        times = [replace(time, rate=rate, ideal=0.05) for rate in learning.RATES]
        found += learning.step_figures(design, 8, times)
    return found


@pytest.mark.parametrize("study", [extreme.STUDY, vision.STUDY])
def test_every_design_can_be_run(study):
    for design in study.designs:
        methods.check([design.timed])
        methods.check([design.learned(100)])
        if design.label != "dense":
            assert isinstance(methods.feedback(design.timed), MomentumCorrection)
    assert vision.STUDY.designs[1].learned(100) == "dragonn:ratio=0.001:warmup=25/momentum"


def test_pages_have_words_and_equal_shares_for_their_tags(folder):
    words, tags = extreme.read(folder / extreme.TRAIN)
    assert words.shape == (70, extreme.WORDS)  # the page without a tag is left out
    assert words[0].nonzero().flatten().tolist() == [0, 499]
    assert tags[0].nonzero().flatten().tolist() == [0, 982]
    workload = make_workload(f"benchmarks.papers.dragonn.extreme_classification.Delicious={folder}")
    batch = workload.batch(0, 0, 1, 4)
    assert batch.inputs.shape == (workload.batch_size, workload.width)
    assert torch.equal(batch.targets.unique(), torch.tensor([0.0, 0.5]))
    assert batch.num_predictions == workload.batch_size
    assert torch.equal(batch.inputs, workload.batch(0, 0, 1, 4).inputs)


def test_a_missing_file_says_where_to_get_it(folder):
    (folder / extreme.TEST).unlink()
    with pytest.raises(OptionError, match="Download the Delicious data set"):
        extreme.Delicious(folder)


def test_a_prediction_of_any_class_of_a_sample_is_right():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    loss, right = evaluate(nn.Identity(), Samples(logits, targets), chunk=2)
    assert right == 2
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, targets, reduction="sum")))


def test_tables_say_who_gets_there_and_how_much_sooner(tmp_path):
    study, path = extreme.STUDY, tmp_path / "study.csv"
    write_figures(study.name, rows(study), path)
    dense, second, third, *_ = learning.read(read_figures(path), study)
    assert (dense.reaches(0.55), second.reaches(0.55), third.reaches(0.55)) == (20, 20, None)
    lines = extreme.table(read_figures(path)).splitlines()
    assert lines[3].endswith(
        "| 60.0% | +0.0 ± 2.5 | 50.0% | +0.0 ± 0.0 | 20 ± 0 (20, 20, 20) | 1 | 100 ms, 10.00, 2.00, 10.00 | "
        "100 ms, 10.00, 2.00, 10.00 |"
    )
    assert "| 30.0% | -30.0 ± 0.0 | 50.0% | +0.0 ± 0.0 | never |" in lines[4]
    assert lines[4].endswith("100 ms, 10.00, 2.00, never |")


def test_crossings_are_those_of_each_seed_and_designs_need_not_be_timed():
    curves = ({20: 0.3, 40: 0.6, 60: 0.6}, {20: 0.6, 40: 0.4, 60: 0.7}, {20: 0.6, 40: 0.6, 60: 0.6})
    found = learning.Found("dragonn", curves, {}, {}, math.nan)
    assert found.crossings(0.5) == [40, 60, 20]
    assert found.reaches(0.5) == 40
    assert found.crossings(0.65) == [None, 60, None]
    assert found.reaches(0.65) is None
    assert found.middle == (0.3, 0.6, 0.6)
    timed = [row for row in rows(extreme.STUDY) if row["method"] != "topk" or row["metric"] == "accuracy"]
    (line,) = [line for line in extreme.table(timed).splitlines() if line.startswith("| topk")]
    assert line.endswith("| 20 ± 0 (20, 20, 20) |  | not timed | not timed |")


def test_the_plot_names_every_design(tmp_path):
    pytest.importorskip("matplotlib")
    vision.plot(rows(vision.STUDY), tmp_path)
    drawn = (tmp_path / "vision.svg").read_text()
    assert all(design.label in drawn for design in vision.STUDY.designs)


def test_what_was_measured_is_not_measured_again(tmp_path):
    done = {key_of(row, extreme.KEY) for row in rows(extreme.STUDY)}
    assert list(extreme.run(tmp_path, done=done)) == []
    part = [row for row in rows(extreme.STUDY) if row["method"] == "topk"]
    assert extreme.table(part) == "There is no table before 'dense' is learned and timed."


@pytest.mark.ci
def test_the_figures_of_a_training_are_written_when_it_ends(folder):
    """Each is a list of rows, which the runner writes at once, and not when the next training begins."""
    found = extreme.run(folder, steps=20, seeds=1, designs="topk", parts="learn", done=set())
    (part,) = list(found)
    assert {key_of(row, extreme.KEY) for row in part} == {("topk", "0")}
    assert {row["metric"] for row in part} == {"accuracy", "validation_loss", "training_loss"}


class SmallTask(Digits):
    """Digits, as a workload with a folder of data."""

    def __init__(self, path: Path) -> None:
        super().__init__()


@pytest.mark.ci
@pytest.mark.root
def test_step_times_that_are_compared_are_of_one_job(tmp_path):
    designs = learning.Design("dense", "ddp-fp32"), learning.Design("topk", "topk:ratio=0.1/momentum")
    study = replace(extreme.STUDY, workload=f"{__name__}.SmallTask", designs=designs)
    (part,) = list(study.run(tmp_path, seconds=0.1, designs="topk", parts="time", done={("dense", "")}))
    assert {key_of(row, extreme.KEY) for row in part} == {("dense", ""), ("topk", "")}
    assert len({row["value"] for row in part if row["metric"] == "step_without_communication"}) == 1
    assert list(study.run(tmp_path, parts="time", done={("dense", ""), ("topk", "")})) == []
