"""The command that repeats the tests of faults: it counts, goes on where it was, and keeps what failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commits import ROOT
from tests.repeat import PAGE, Runs, counts, fault_tests, needed

TESTS = """
import pathlib

def test_that_fails_once():
    log = pathlib.Path(__file__).with_name("log")
    log.write_text((log.read_text() if log.exists() else "") + ".")
    assert len(log.read_text()) != 3, "the third one"

def test_that_passes(tmp_path):
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").touch()
"""


def test_the_tests_of_faults_are_those_of_the_page() -> None:
    found = fault_tests()
    assert len(found) > 50
    assert all(f"`{name}`" in PAGE.read_text() for name in found)
    assert not [name for name in found if "tests/fuzz" in name], "of broken bytes, there is a campaign of their own"


def test_all_forms_of_a_test_share_its_runs() -> None:
    forms = ["test_a.py::test_kill[early]", "test_a.py::test_kill[late]", "test_a.py::test_kill[never]"]
    assert needed([*forms, "test_a.py::test_freeze"], 200) == dict.fromkeys(forms, 67) | {"test_a.py::test_freeze": 200}


@pytest.mark.ci
def test_runs_are_counted_over_several_sittings_and_failures_are_kept(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")

    record = tmp_path / "repeated.csv"

    def repeat(runs: int) -> subprocess.CompletedProcess[str]:
        places = ["--folder", str(tmp_path / "kept"), "--record", str(record)]
        options = ["--runs", str(runs), "--test", "test_some.py", "--processes", "1"]
        command = [sys.executable, "-m", "tests.repeat", *places, *options]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        return subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)

    assert repeat(2).returncode == 0
    found = repeat(4)
    assert found.returncode == 1, found.stdout
    assert counts(record) == {
        "test_some.py::test_that_passes": Runs(4, 0, 0, 4),
        "test_some.py::test_that_fails_once": Runs(2, 1, 0, 0),
    }
    [kept] = (tmp_path / "kept").glob("*.txt")
    assert "the third one" in kept.read_text()
    assert repeat(2).returncode == 0, "the one that failed starts over"
    assert counts(record)["test_some.py::test_that_fails_once"] == Runs(4, 1, 0, 2)
    (tmp_path / "test_some.py").write_text(TESTS.replace("test_that_fails_once", "not_a_test"))
    assert repeat(40).returncode == 0
    assert counts(record)["test_some.py::test_that_passes"] == Runs(40, 0, 0, 40), "set up each time, if it is alone"
