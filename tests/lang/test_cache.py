"""Generated source on disk: found by content, written atomically, and optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.lang import cache

_LOAD = """\
import sys
from gradwire.lang import cache
module = cache.load("test", "VALUE = 1\\n" + "#" * 1_000_000)
print(module.__file__, module.VALUE, file=sys.stdout)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(cache, "_modules", {})
    return tmp_path


def start(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _LOAD], env=os.environ | env, text=True, stdout=subprocess.PIPE)


def test_the_same_source_is_one_file_and_one_module(folder: Path) -> None:
    first, again = cache.load("a", "VALUE = 1\n"), cache.load("a", "VALUE = 1\n")
    assert first is again
    assert [path.read_text() for path in folder.iterdir() if path.suffix == ".py"] == ["VALUE = 1\n"]


def test_other_sources_and_other_names_are_other_files(folder: Path) -> None:
    modules = [cache.load("a", "VALUE = 1\n"), cache.load("a", "VALUE = 2\n"), cache.load("b", "VALUE = 1\n")]
    assert [module.VALUE for module in modules] == [1, 2, 1]
    assert len({module.__file__ for module in modules}) == 3


def test_a_file_from_before_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(cache.load("a", "VALUE = 1\n").__file__))
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(cache, "_modules", {})
    assert cache.load("a", "VALUE = 1\n").VALUE == 1
    assert path.stat().st_mtime_ns == written


def test_a_change_of_what_generated_code_is_built_on_is_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache.load("a", "VALUE = 1\n").__file__
    monkeypatch.setattr(cache, "fingerprint", lambda: "of other kernels")
    assert cache.load("a", "VALUE = 1\n").__file__ != before


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    processes = [start(GRADWIRE_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(said) == 1
    path, value = said.pop().split()
    assert (Path(path).parent, value) == (tmp_path / "generated", "1")
    assert [each.name for each in (tmp_path / "generated").iterdir() if each.is_file()] == [Path(path).name]


def test_where_nothing_can_be_written_a_folder_of_its_own_will_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made below this")
    said, _ = start(GRADWIRE_CACHE_DIR=str(tmp_path / "file"), TMPDIR=str(tmp_path)).communicate(timeout=60)
    path, value = said.split()
    assert value == "1"
    assert Path(path).parent.parent == tmp_path
    assert Path(path).parent.name.startswith("gradwire-")
