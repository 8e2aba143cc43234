"""A checkpoint is loaded as it was saved, or refused with an error that names the file."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gradwire.core.errors import StateError
from gradwire.parameter_server.checkpoint import Checkpoint
from gradwire.parameter_server.folder import StateFolder
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from tests.parameter_server.harness import EPOCH, Job, make_config

WORKERS = 2
STEP = 41
"""Damage is tried in every byte whose number is a multiple of it, and so in every field of the file."""


@pytest.fixture
def largest_file() -> Iterator[None]:
    """No file of this process can be longer than 1 KiB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Saved:
    """The checkpoint of a job in the middle of a step."""

    def __init__(self, folder: StateFolder) -> None:
        self.folder = folder
        job = Job(make_config(workers=WORKERS, optimizer="Adam"))
        job.start()
        job.train(3)
        job.workers[0].push(job.grads())
        job.settle()
        self.shard, self.machine = job.shard, job.machine
        self.path = folder.path / "checkpoint-5.safetensors"
        with Checkpoint(folder, job.machine).save(5) as self.digest:
            assert not self.path.exists()
        self.content = self.path.read_bytes()

    def load(self) -> tuple[bytes, ParameterShard]:
        shard = ParameterShard()
        checkpoint = Checkpoint(self.folder, ServerStateMachine(WORKERS, EPOCH, shard))
        digest = checkpoint.load(5)
        assert checkpoint.digest(5) == digest
        assert checkpoint.digest(6) != digest
        return digest, shard

    def assert_refused(self, content: bytes, match: str = "damaged") -> None:
        self.path.write_bytes(content)
        with pytest.raises(StateError, match=match) as raised:
            self.load()
        assert str(self.path) in str(raised.value)


@pytest.fixture
def saved(tmp_path: Path):
    folder = StateFolder(tmp_path)
    yield Saved(folder)
    folder.close()


def test_what_was_saved_is_loaded(saved: Saved) -> None:
    digest, shard = saved.load()
    assert digest == saved.digest
    for tensor, parameter in saved.shard.parameters.items():
        assert torch.equal(shard.parameters[tensor], parameter)
        assert torch.equal(shard.replicas[tensor], saved.shard.replicas[tensor])
    assert sorted(path.name for path in saved.folder.path.iterdir()) == ["checkpoint-5.safetensors", "lock"]
    assert saved.path.stat().st_mode & 0o777 == 0o600


def test_a_flipped_bit_is_refused(saved: Saved) -> None:
    for at in range(0, len(saved.content), STEP):
        damaged = bytearray(saved.content)
        damaged[at] ^= 1 << at % 8
        saved.assert_refused(bytes(damaged))


def test_a_file_that_was_cut_short_is_refused(saved: Saved) -> None:
    for size in range(0, len(saved.content), STEP):
        saved.assert_refused(saved.content[:size])


def test_another_file_is_refused(saved: Saved, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(3)}, other)
    for content in (other.read_bytes(), b"no checkpoint at all", b"\0" * 5000):
        saved.assert_refused(content)


def test_another_version_is_refused_as_such(saved: Saved, tmp_path: Path) -> None:
    with safe_open(saved.path, "pt") as file:
        text = json.loads(file.metadata()["gradwire"])
    text = json.dumps({**text, "version": 3})
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    other = tmp_path / "other.safetensors"
    save_file({}, other, {"gradwire": text, "digest": digest})
    saved.assert_refused(other.read_bytes(), "has version 3, but .* start the job again in another folder")


def test_a_checkpoint_of_another_number_is_refused(saved: Saved) -> None:
    saved.path.rename(saved.path.with_name("checkpoint-6.safetensors"))
    with pytest.raises(StateError, match="is of journal 5"):
        Checkpoint(saved.folder, ServerStateMachine(WORKERS, EPOCH, ParameterShard())).load(6)


def test_an_interrupted_save_leaves_the_one_before(saved: Saved) -> None:
    machine = ServerStateMachine(WORKERS, EPOCH, ParameterShard())
    checkpoint = Checkpoint(saved.folder, machine)
    checkpoint.load(5)
    with pytest.raises(RuntimeError), checkpoint.save(5):
        raise RuntimeError("no journal could be made for it")
    assert saved.path.read_bytes() == saved.content


def test_a_checkpoint_that_finds_no_room_is_an_error_with_advice_and_the_one_before_is_kept(
    saved: Saved, largest_file: None
) -> None:
    with (
        pytest.raises(StateError, match=r"could not be written to .* Is the disk full"),
        Checkpoint(saved.folder, saved.machine).save(6),
    ):
        pytest.fail("nothing was saved")
    assert list(saved.folder.path.glob("checkpoint*.safetensors")) == [saved.path]
    assert saved.path.read_bytes() == saved.content
