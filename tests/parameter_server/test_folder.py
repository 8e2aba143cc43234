"""The folder of a server's state: one server at a time, and nothing for others to read."""

from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gradwire.core.errors import StateError
from gradwire.parameter_server.folder import StateFolder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    with pytest.raises(StateError, match=rf"in use by another server \(process {os.getpid()} on ") as raised:
        StateFolder(tmp_path / "state")
    assert str(tmp_path / "state") in str(raised.value)
    StateFolder(tmp_path / "other").close()
    first.close()
    first.close()
    StateFolder(tmp_path / "state").close()


def hold(pipe: Connection, path: str, forks: bool) -> None:
    """Hold a folder until the pipe ends, or end with it held and leave a forked child behind."""
    folder = StateFolder(Path(path))
    if forks and os.fork():
        os._exit(0)
    pipe.send(folder.forked)
    pipe.recv()


@pytest.mark.parametrize("forks", [False, True], ids=["killed", "killed, with a forked child"])
def test_who_has_died_holds_nothing(tmp_path: Path, forks: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(theirs, str(tmp_path), forks))
    holder.start()
    theirs.close()
    with pipe:
        assert pipe.recv() is forks
        if not forks:
            with pytest.raises(StateError, match=f"process {holder.pid}"):
                StateFolder(tmp_path)
        holder.kill()
        holder.join()
        StateFolder(tmp_path).close()


def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(StateError, match=rf"Everybody can write to the state folder {tmp_path}. Run chmod o-w"):
        StateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o775)
    StateFolder(tmp_path).close()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for content in (b"one", b"two"):
        with folder.replace("file") as fresh, folder.open(fresh, "wb") as file:
            file.write(content)
    with pytest.raises(FileNotFoundError), folder.replace("file") as fresh:
        (tmp_path / fresh).with_name("elsewhere").write_bytes(b"thr")
    assert (tmp_path / "file").read_bytes() == b"two"
    folder.close()


def test_others_may_read_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = StateFolder(tmp_path / "state")
        (folder.path / "old").touch(0o644)
        for name, how in (("old", "r+b"), ("new", "wb")):
            folder.open(name, how).close()
        folder.close()
    finally:
        os.umask(before)
    assert mode(folder.path) == 0o700
    assert {path.name: mode(path) for path in folder.path.iterdir()} == dict.fromkeys(("lock", "old", "new"), 0o600)
