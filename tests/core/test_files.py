"""Files that other processes may read or write at the same time."""

from __future__ import annotations

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


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
