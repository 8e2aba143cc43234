"""The campaign that is guided by coverage: it finds what random bytes do not, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import guided
from tests.fuzz.targets import targets


def test_what_is_fuzzed_by_default_are_targets_of_the_campaign() -> None:
    assert set(guided.CHOSEN) <= set(targets())


@pytest.mark.ci
@pytest.mark.atheris
def test_guidance_finds_the_way_through_a_maze(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.maze", "-runs=300000", "-seed=1", f"-artifact_prefix={tmp_path}/"]
    found = guided.run(command, tmp_path / "log")
    assert "BrokenPromiseError: the end of the maze was found" in found.failure
    [way] = tmp_path.glob("crash-*")
    assert way.read_bytes()[2:6] == b"grad"


@pytest.mark.ci
@pytest.mark.atheris
def test_a_reader_is_fuzzed_and_new_branches_are_reached(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.guided", "--target", "frame", "--cases", "2000"]
    said = subprocess.run([*command, "--folder", str(tmp_path)], cwd=guided.ROOT, text=True, capture_output=True)
    assert said.returncode == 0, said.stdout + said.stderr
    log = (tmp_path / "frame.log").read_text()
    assert "DONE" in log
    assert len(list((tmp_path / "frame").iterdir())) > len(targets()["frame"].corpus()), "inputs that were kept"


def test_kernels_are_left_as_they_are() -> None:
    found = guided.compiled_modules()
    assert {"gradwire.kernels", "gradwire.kernels.cpu.floats", "gradwire.lang.targets.numba.runtime"} <= set(found)
    assert not [name for name in found if not name.startswith(("gradwire.kernels", "gradwire.lang"))]
