"""Records: commit and date of the run, and no record of a tree with changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gradwire.bench import environment
from gradwire.bench.environment import Checkout
from gradwire.bench.records import RecordError, check_record, read_figures, write_figures

FIGURE = {"method": "topk", "metric": "step", "value": 0.25, "unit": "s"}


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with one source file, from which the package seems to run."""
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    (root / "src" / "code.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Start")
    monkeypatch.setattr(environment, "ROOT", root)
    return root


@pytest.fixture
def record(root):
    return root / "benchmarks" / "results" / "a.csv"


def test_a_record_has_commit_and_date_of_its_run(root, record):
    write_figures("a", [FIGURE], record)
    (row,) = read_figures(record)
    assert row["commit"] == git(root, "rev-parse", "--short", "HEAD")
    assert row["date"].endswith("UTC") and row["value"] == 0.25


def test_rows_without_a_metric_have_them_too(root, record):
    write_figures("a", [{"ranks": 4, "step_seconds": 0.5}], record)
    (row,) = read_figures(record)
    assert list(row) == ["ranks", "step_seconds", "benchmark", "device", "cores", "versions", "commit", "date"]
    assert row["commit"] and row["date"]


def test_a_write_that_fails_leaves_the_record_as_it_was(record):
    class Unwritable:
        def __str__(self) -> str:
            raise RuntimeError("the process ends here")

    write_figures("a", [FIGURE], record)
    with pytest.raises(RuntimeError):
        write_figures("a", [FIGURE, {**FIGURE, "value": Unwritable()}], record)
    (row,) = read_figures(record)
    assert row["value"] == 0.25


@pytest.mark.parametrize("change", ["edited", "staged", "untracked"])
def test_a_tree_with_changes_gets_no_record_and_loses_no_figures(root, record, change):
    changed = root / "src" / ("new.py" if change == "untracked" else "code.py")
    changed.write_text("x = 2\n")
    if change == "staged":
        git(root, "add", ".")
    with pytest.raises(RecordError, match=rf"src/{changed.name}\. Commit them first, or write to another file"):
        check_record(record)
    with pytest.raises(RecordError, match=r"The figures are in /.*/a\.csv\.$") as error:
        write_figures("a", [FIGURE], record)
    assert not record.exists()
    kept = Path(str(error.value).split("The figures are in ")[1].rstrip("."))
    assert read_figures(kept)[0]["commit"].endswith("-dirty")


def test_a_file_elsewhere_says_that_the_tree_had_changes(root, tmp_path):
    (root / "src" / "code.py").write_text("x = 2\n")
    write_figures("a", [FIGURE], tmp_path / "trial.csv")
    assert read_figures(tmp_path / "trial.csv")[0]["commit"] == git(root, "rev-parse", "--short", "HEAD") + "-dirty"


def test_records_themselves_are_no_changes(root, record):
    for value in (1, 2):
        write_figures("a", [{**FIGURE, "value": value}], record)
    assert read_figures(record)[0]["value"] == 2


def test_a_commit_that_is_made_during_a_run_counts_as_a_change(root, record):
    begun = Checkout.of(root).commit
    (root / "src" / "code.py").write_text("x = 2\n")
    git(root, "commit", "-qam", "Change")
    with pytest.raises(RecordError, match=f"differ from commit {begun}: src/code.py"):
        write_figures("a", [FIGURE], record)


def test_earlier_rows_keep_their_commit(root, record):
    write_figures("a", [{**FIGURE, "commit": "12e4567", "date": "2026-01-01 00:00 UTC"}, FIGURE], record)
    old, new = read_figures(record)
    assert (old["commit"], old["date"]) == ("12e4567", "2026-01-01 00:00 UTC")
    assert new["commit"] != old["commit"]


def test_an_installed_package_records_its_release(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    write_figures("a", [FIGURE], tmp_path / "benchmarks" / "results" / "a.csv")
    assert read_figures(tmp_path / "benchmarks" / "results" / "a.csv")[0]["commit"].startswith("release ")


def test_a_plan_of_hundreds_of_tensors_is_read_again(tmp_path):
    write_figures("test", [{"metric": "settled", "plan": "x" * 200_000}], tmp_path / "record.csv")
    assert read_figures(tmp_path / "record.csv")[0]["plan"] == "x" * 200_000
