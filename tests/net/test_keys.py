from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gradwire.core.errors import OptionError
from gradwire.net.keys import given_key, job_key, loopback_key


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """The user's state folder, and no key given."""
    for name in ("GRADWIRE_JOB_KEY", "GRADWIRE_JOB_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "state" / "gradwire"


@pytest.fixture
def path(tmp_path) -> Path:
    made = tmp_path / "job.key"
    made.write_text("ab" * 32 + "\n")
    made.chmod(0o600)
    return made


def test_a_server_that_others_can_reach_needs_a_key():
    with pytest.raises(OptionError, match="name it in GRADWIRE_JOB_KEY_FILE"):
        job_key("10.0.0.1", "a")
    assert job_key("10.0.0.1", "a", insecure=True).reveal() != job_key("10.0.0.1", "b", insecure=True).reveal()


def test_a_key_comes_from_a_file_or_the_environment(path, monkeypatch):
    assert given_key() is None
    assert job_key("10.0.0.1", "a", file=path).reveal() == bytes([0xAB]) * 32
    monkeypatch.setenv("GRADWIRE_JOB_KEY", "cd" * 32)
    assert job_key("127.0.0.1", "a").reveal() == bytes([0xCD]) * 32
    monkeypatch.setenv("GRADWIRE_JOB_KEY_FILE", str(path))
    assert job_key("127.0.0.1", "a").reveal() == bytes([0xAB]) * 32


def test_a_file_that_others_can_read_is_refused(path):
    path.chmod(0o640)
    with pytest.raises(OptionError, match="Run chmod 600"):
        given_key(path)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_refused(path, monkeypatch):
    os.chown(path, 12345, -1)
    with pytest.raises(OptionError, match="belongs to user 12345, who can change it"):
        given_key(path)


def test_digits_that_are_no_key_are_not_repeated(path):
    path.write_text("ab" * 31)
    with pytest.raises(OptionError, match="64 hexadecimal") as raised:
        given_key(path)
    assert "abab" not in str(raised.value)


@pytest.mark.ci  # imports torch three times
def test_processes_of_a_user_share_a_random_key_on_loopback(state):
    code = "from gradwire.net.keys import loopback_key; print(loopback_key().reveal().hex())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate()[0].strip() for process in processes} == {job_key("::1", "a").reveal().hex()}
    assert stat.S_IMODE((state / "loopback.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert [each.name for each in state.iterdir()] == ["loopback.key"]


def test_two_users_have_different_keys(tmp_path, monkeypatch):
    mine = loopback_key().reveal()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert loopback_key().reveal() != mine


def test_without_a_state_folder_the_key_is_in_a_private_folder(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # not a folder
    with caplog.at_level(logging.DEBUG):
        key = loopback_key()
    private = tmp_path / f"gradwire-{os.getuid()}"
    assert bytes.fromhex((private / "loopback.key").read_text()) == key.reveal()
    assert key.reveal().hex() not in caplog.text
    private.chmod(0o755)  # others could put a key of theirs there
    with pytest.raises(OptionError, match="Name a file with a job key in GRADWIRE_JOB_KEY_FILE"):
        loopback_key()
