"""The flight recorder's file: complete, JSON whatever was in the events, and never over another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.core.errors import PeerLostError
from gradwire.core.events import Event, EventStream
from gradwire.observe.recorder import default_directory, write_dump


def dump(directory: Path, **state: object) -> tuple[PeerLostError, Path]:
    error = PeerLostError("Rank 2 is gone.", rank=2, tensor="w", phase="recv scatter")
    events = EventStream()
    events.emit(Event("send", 1.0, 0.0, "w", 3, 72, 2))
    path = write_dump(error, rank=1, world_size=4, events=events, state=dict(state), directory=directory)
    return error, path


def test_the_file_tells_what_happened(tmp_path: Path) -> None:
    error, path = dump(tmp_path / "made" / "anew", sent_bytes=[0, 72])
    found = json.loads(path.read_text())
    assert error.dump == str(path)
    assert (found["version"], found["rank"], found["world_size"]) == (1, 1, 4)
    assert found["error"] == {
        "type": "PeerLostError", "message": "Rank 2 is gone.", "rank": 2, "tensor": "w", "phase": "recv scatter",
    }  # fmt: skip
    assert found["state"] == {"sent_bytes": [0, 72]}
    assert found["events"] == [Event("send", 1.0, 0.0, "w", 3, 72, 2).as_dict()]
    assert found["monotonic_now"] > 0


def test_what_is_no_json_is_written_as_text(tmp_path: Path) -> None:
    _, path = dump(tmp_path, odd=Path("somewhere"))
    assert json.loads(path.read_text())["state"] == {"odd": "somewhere"}


def test_a_second_failure_in_the_same_second_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Two attached modules of one process fail together when a rank dies."""
    paths = {dump(tmp_path, number=number)[1] for number in range(5)}
    assert len(paths) == 5
    assert sorted(json.loads(path.read_text())["state"]["number"] for path in paths) == [0, 1, 2, 3, 4]


def test_the_folder_is_the_environments_or_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADWIRE_DUMP_DIR", str(tmp_path))
    assert default_directory() == tmp_path
    error = PeerLostError("gone")
    assert write_dump(error, rank=0, world_size=2, events=EventStream(), state={}).parent == tmp_path
    monkeypatch.delenv("GRADWIRE_DUMP_DIR")
    assert default_directory().name == "gradwire"
