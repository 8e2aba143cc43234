"""Files that other processes may read or write at the same time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gradwire.core.files import write_whole


def test_no_reader_sees_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    texts = [letter * 300_000 for letter in "ab"]
    write_whole(path, texts[0])
    threads = [
        threading.Thread(target=lambda text=text: [write_whole(path, text) for _ in range(100)]) for text in texts
    ]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found.append(path.read_text())
    assert found
    assert set(found) <= set(texts)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_link_stays_one_and_a_mode_too(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "latest"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, found = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_whole(path, "text")
    reader.join(10)
    assert found == ["text"] and path.is_fifo()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
