"""Data of the language model, and figures computed from its loss curves."""

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.papers.gcomp import lab as gcomp_lab
from benchmarks.papers.hipress import convergence, words

from gradwire.bench import methods
from gradwire.bench.records import read_figures, write_figures
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError
from tests.bench.support import method, result


@pytest.fixture
def folder(tmp_path):
    (tmp_path / words.TRAIN).write_text(" = Title = \n \n a b a <unk> c\n" * 20)
    (tmp_path / words.HELD_OUT).write_text("a b d\n" * 20)
    return tmp_path


@pytest.fixture
def run():
    """DDP reaches its last perplexity in the last step; the other passes below it for good in the second."""
    entries = [method("ddp-fp32", 1.0, 40e6, 2.0), method("minmax:bits=2@scatter_reduce", 0.5, 4e6, 2.0)]
    entries[1].losses[:] = [4.0, 1.8, 1.9]
    for entry, seconds in zip(entries, (10.0, 2.0)):
        entry.train_seconds[:] = [seconds] * 3
    return result(*entries)


def test_words_that_are_rare_or_unknown_share_a_class():
    known = words.vocabulary(["b", "a", "<unk>", "b", "<unk>", "<unk>"])
    assert known == {"<unk>": 0, "b": 1, "a": 2}
    assert words.encode(["a", "<unk>", "never seen"], known).tolist() == [2, 0, 0]


def test_targets_are_the_words_that_follow(folder):
    workload = make_workload(f"{convergence.WORDS}={folder}")
    samples = workload.batch(0, 0, 1, 4)
    assert samples.inputs.shape == samples.targets.shape == (workload.batch_size, words.WINDOW)
    assert torch.equal(samples.inputs[:, 1:], samples.targets[:, :-1])


def test_lines_end_in_a_mark_and_empty_ones_are_left_out(folder):
    assert words.read_words(folder / words.TRAIN)[:5] == ["=", "Title", "=", words.END, "a"]


def test_a_missing_file_says_where_to_get_it(folder):
    (folder / words.HELD_OUT).unlink()
    with pytest.raises(OptionError, match=r"no test\.txt .* Download WikiText-2"):
        make_workload(f"{convergence.WORDS}={folder}")


def test_the_methods_exist():
    methods.check(list(convergence.compared(300)))


def test_the_goal_is_reached_once_perplexity_stays_below(run):
    ddp, minmax = run.results
    goal = convergence.CLOSE * convergence.curve(ddp)[-1][2]
    assert convergence.reached(ddp, goal) == (3, 30.0)
    assert convergence.reached(minmax, goal) == (2, 4.0)
    assert convergence.reached(ddp, 1.0) is None


def test_curves_are_written_beside_the_final_figures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "EVERY", 1)
    write_figures("convergence", convergence.figures(run), tmp_path / "c.csv")
    rows = read_figures(tmp_path / "c.csv")
    curve = [row for row in rows if row["metric"] == "training_perplexity" and row["method"] == "ddp-fp32"]
    assert [(row["step"], row["seconds"]) for row in curve] == [(1, 10.0), (2, 20.0), (3, 30.0)]
    final = next(row for row in rows if row["metric"] == "validation_perplexity")
    assert final["value"] == pytest.approx(math.exp(2.0))
    assert "minmax bits 2, scatter_reduce" in convergence.table(rows)


def test_gcomp_in_the_lab_has_the_same_curves_at_each_rate(run, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "EVERY", 1)
    parts = [(replace(run, ranks=2), "100mbit"), (run, "100mbit"), (run, "1gbit"), (run, "2.5gbit")]
    rows = [row for part in parts for row in gcomp_lab.figures(*part)]
    assert {row["benchmark"] for row in rows if "benchmark" in row} == {gcomp_lab.NAME}
    curves = [row for row in rows if row["metric"] in ("training_perplexity", "seconds_to_goal")]
    assert {(row["ranks"], row["rate"]) for row in curves} == {(4, "1gbit"), (4, "2.5gbit")}
    assert {row["ranks"] for row in rows if row["metric"] == "step" and row["rate"] == "100mbit"} == {2, 4}
    text = gcomp_lab.table(rows)
    assert "1,000   1,216" in text  # milliseconds, and windows a second of 4 · 304
    assert text.count("a training at") == 2
    gcomp_lab.plot(rows, tmp_path)
    assert (tmp_path / "2.5gbit" / "convergence.svg").exists()
    methods.check(list(gcomp_lab.METHODS))


def test_parts_of_the_lab():
    assert list(gcomp_lab.run(ranks="4", done={("4", rate) for rate in gcomp_lab.RATES})) == []
    whole, timed = gcomp_lab.options(4, "1gbit", 7, 1.0), gcomp_lab.options(2, "1gbit", 7, 1.0)
    assert (whole.steps, whole.train_rate, whole.rates) == (7, "1gbit", ("1gbit",))
    assert (timed.steps, timed.train_rate, timed.rates) == (1, None, ("1gbit",))
    assert gcomp_lab.options(4, "100mbit", 7, 1.0).train_rate is None
