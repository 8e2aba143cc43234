"""The thread that writes statuses: until the end, however that comes, and without harm to training."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from gradwire.observe import status_files
from gradwire.observe.status import RankStatus
from gradwire.observe.status_writer import StatusWriter
from tests.observe.statuses import status

SOON = timedelta(milliseconds=5)
LATER = timedelta(hours=1)
PATIENCE = 60.0


class Source:
    """Returns statuses with rising steps, and says when there were some."""

    def __init__(self) -> None:
        self.step = 0
        self.several = threading.Event()

    def __call__(self, end: str) -> RankStatus:
        self.step += 1
        if self.step > 3:
            self.several.set()
        return status(step=self.step, end=end)


def test_it_writes_at_intervals_and_how_it_ended(tmp_path: Path) -> None:
    source = Source()
    writer = StatusWriter(tmp_path / "new" / "status-a.json", source, SOON)
    assert source.several.wait(PATIENCE)
    writer.close("detached")
    writer.close("exited")
    (found,) = status_files.read_folder(tmp_path / "new").files
    assert found.status.end == "detached" and found.status.step == source.step > 3


def test_closing_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status-a.json", Source(), LATER)
    writer.close("detached")
    assert not writer._thread.is_alive()


def test_a_status_with_an_end_is_the_last(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "status-a.json", lambda end: status(end="detached"), LATER)
    writer._thread.join(PATIENCE)
    assert not writer._thread.is_alive()
    writer.close("exited")


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    source = Source()
    with caplog.at_level(logging.WARNING, "gradwire"):
        writer = StatusWriter(tmp_path / "file" / "status-a.json", source, SOON)
        assert source.several.wait(PATIENCE), "it tries again"
        writer.close("detached")
    (record,) = caplog.records
    assert "gradwire top cannot show this rank" in record.message and "status-a.json" in record.message


@pytest.mark.parametrize("last_words", ["", "raise ZeroDivisionError"])
def test_the_end_of_an_interpreter_is_written(tmp_path: Path, last_words: str) -> None:
    code = f"""
from datetime import timedelta
from pathlib import Path
from gradwire.observe.status_writer import StatusWriter
from tests.observe.statuses import status
writer = StatusWriter(Path({str(tmp_path)!r}) / "status-a.json", lambda end: status(end=end), timedelta(hours=1))
{last_words}
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == bool(last_words), done.stderr
    (found,) = status_files.read_folder(tmp_path).files
    assert found.status.end == "exited"
