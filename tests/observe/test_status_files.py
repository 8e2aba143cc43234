"""Status files: whole, private, and read without trust."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gradwire.observe import status as statuses
from gradwire.observe import status_files
from gradwire.observe.status import encode
from tests.observe.statuses import status


def test_a_file_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = status_files.path_of(tmp_path, "00c0ffee00c0ffee", 0)
    before = os.umask(0)
    try:
        status_files.write(path, status(step=1))
        first = path.open("rb")
        path.with_name(path.name + status_files.UNFINISHED).write_text("of a write that failed")
        status_files.write(path, status(step=2))
    finally:
        os.umask(before)
    with first:
        assert statuses.decode(first.read()).step == 1, "who has it open reads the whole former one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    (found,) = status_files.read_folder(tmp_path).files
    assert found.status.step == 2 and found.age >= 0


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = status_files.path_of(tmp_path, "00c0ffee00c0ffee", 0)
    path.symlink_to(victim)
    path.with_name(path.name + status_files.UNFINISHED).symlink_to(victim)
    status_files.write(path, status())
    assert victim.read_text() == "precious" and not path.is_symlink()


def test_only_whole_files_of_the_user_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(encode(status()))
    (folder / "status-link.json").symlink_to(elsewhere)
    os.mkfifo(folder / "status-pipe.json")
    (folder / "status-folder.json").mkdir()
    (folder / "status-large.json").write_bytes(b" " * (10 * statuses.MAX_BYTES))
    (folder / "status-\x1b[2J.json").write_bytes(b"\x00")
    (folder / "status-unfinished.json.new").write_bytes(b"{")
    (folder / "flight-1.json").write_bytes(b"{}")
    (folder / "status-good.json").write_bytes(encode(status(rank=1)))
    found = status_files.read_folder(folder)
    assert [each.status.rank for each in found.files] == [1]
    assert found.refused.keys() == {
        "status-link.json", "status-pipe.json", "status-folder.json", "status-large.json", "status-\\x1b[2J.json"
    }  # fmt: skip
    assert found.refused["status-pipe.json"] == "It is not a file."
    assert found.refused["status-large.json"] == "It has more than 262144 bytes."
    assert all(reason.isprintable() for reason in found.refused.values())


def test_files_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = status_files.path_of(tmp_path, "00c0ffee00c0ffee", 0)
    status_files.write(path, status())
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    found = status_files.read_folder(tmp_path)
    assert found.files == () and found.refused == {path.name: f"It belongs to another user ({owner})."}


def test_of_many_files_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_files, "MAX_FILES", 3)
    for rank in range(6):
        path = status_files.path_of(tmp_path, "00c0ffee00c0ffee", rank)
        status_files.write(path, status(rank, world_size=6))
        os.utime(path, (1e9 + rank, 1e9 + rank))
    assert [each.status.rank for each in status_files.read_folder(tmp_path).files] == [5, 4, 3]


def test_files_that_nobody_writes_any_more_are_removed_and_no_others(tmp_path: Path) -> None:
    old, young = (status_files.path_of(tmp_path, job, 0) for job in ("00c0ffee00c0ffee", "0123456789abcdef"))
    of_the_user = {"flight-1.json", "status-notes.md", "status-2026.json", "status-00c0ffee00c0ffee-rank0.json.bak"}
    for name in (old.name, f"{old.name}.new", young.name, *of_the_user):
        (tmp_path / name).write_text("{}")
        if name != young.name:
            os.utime(tmp_path / name, (1e9, 1e9))
    status_files.remove_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {young.name, *of_the_user}
