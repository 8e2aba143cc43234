"""The flight recorder's file is complete, always JSON, and never overwrites another one."""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

import pytest

from gradwire.core.errors import PeerLostError
from gradwire.core.events import Event, EventStream
from gradwire.observe.recorder import write_dump


def dump(directory: Path | None, **state: object) -> tuple[PeerLostError, Path]:
    error = PeerLostError("Rank 2 is gone.", rank=2, tensor="w", phase="recv scatter")
    events = EventStream()
    events.emit(Event("send", 1.0, 0.0, "w", 3, 72, 2))
    path = write_dump(error, rank=1, world_size=4, events=events, state=dict(state), directory=directory)
    return error, path


def test_the_file_describes_the_failure(tmp_path: Path) -> None:
    error, path = dump(tmp_path / "new" / "folder", sent_bytes=[0, 72])
    found = json.loads(path.read_text())
    assert error.dump == str(path)
    assert (found["version"], found["rank"], found["world_size"]) == (1, 1, 4)
    assert found["error"] == {
        "type": "PeerLostError", "message": "Rank 2 is gone.", "rank": 2, "tensor": "w", "phase": "recv scatter",
    }  # fmt: skip
    assert found["state"] == {"sent_bytes": [0, 72]}
    assert found["events"] == [Event("send", 1.0, 0.0, "w", 3, 72, 2).as_dict()]
    assert found["monotonic_now"] > 0


def test_values_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    _, path = dump(tmp_path, odd=Path("somewhere"))
    assert json.loads(path.read_text())["state"] == {"odd": "somewhere"}


def test_a_second_failure_in_the_same_second_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Two attached modules of one process fail together when a rank dies."""
    paths = {dump(tmp_path, number=number)[1] for number in range(5)}
    assert len(paths) == 5
    assert sorted(json.loads(path.read_text())["state"]["number"] for path in paths) == [0, 1, 2, 3, 4]


def test_the_folder_is_the_environments_or_a_private_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_DUMP_DIR", str(tmp_path / "chosen"))
    assert dump(None)[1].parent == tmp_path / "chosen"
    monkeypatch.delenv("GRADWIRE_DUMP_DIR")
    for _ in range(2):
        assert dump(None)[1].parent == tmp_path / f"gradwire-{os.getuid()}"
    assert stat.S_IMODE((tmp_path / f"gradwire-{os.getuid()}").stat().st_mode) == 0o700


def test_links_in_the_way_do_not_lead_to_other_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who can write to the folder and guesses the name can neither redirect nor prevent the dump."""
    victim, chosen = tmp_path / "victim", tmp_path / "chosen"
    victim.write_text("precious")
    chosen.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0")
    now = time.time()
    for second in range(10):
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now + second))
        for number in range(100):
            (chosen / f"flight-{moment}-rank1-{os.getpid()}-{number}.json").symlink_to(victim)
    error, path = dump(chosen)
    assert victim.read_text() == "precious"
    assert json.loads(path.read_text())["error"]["message"] == str(error)
    assert str(path.parent) in caplog.text


@pytest.mark.parametrize("theirs", ["another user's", "open to all", "a link", "a file"])
def test_a_folder_that_is_not_private_does_not_prevent_the_dump(
    theirs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GRADWIRE_DUMP_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uid = os.getuid() + (theirs == "another user's")  # then the folder belongs to another user, as the process sees it
    monkeypatch.setattr(os, "getuid", lambda: uid)
    (tmp_path / "elsewhere").mkdir()
    for name in ("gradwire", f"gradwire-{uid}"):
        if theirs == "a link":
            (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        elif theirs == "a file":
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name).chmod(0o777 if theirs == "open to all" else 0o700)
    error, path = dump(None)
    assert json.loads(path.read_text())["error"]["message"] == str(error)
    assert error.dump == str(path)
    assert path.parent.parent == tmp_path and path.parent.name not in ("gradwire", f"gradwire-{uid}", "elsewhere")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert str(path.parent) in caplog.text
