"""The command without ranks: what it says where it cannot measure, and on one rank alone."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from gradwire.cli import probe as command
from gradwire.core.errors import GradwireError, UnknownNameError
from tests.integration.launch import free_port

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def app(monkeypatch) -> typer.Typer:
    """In the environment of a job's only rank."""
    for name, value in zip(VARIABLES, ("0", "1", "127.0.0.1", str(free_port()))):
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return app


def invoke(app: typer.Typer, *arguments: str) -> str:
    return CliRunner().invoke(app, ["probe", *arguments], catch_exceptions=False).output


def test_without_a_launcher_the_command_to_run_is_given(app, monkeypatch):
    monkeypatch.delenv("RANK")
    with pytest.raises(
        GradwireError, match=r"RANK is not set. Start it with torchrun --nproc-per-node 4 -m gradwire\.cli probe text"
    ):
        invoke(app, "text")


def test_one_rank_is_timed_and_told_what_to_do(app, tmp_path):
    path = tmp_path / "found.json"
    output = invoke(app, "digits", "--seconds", "0.05", "--json", str(path))
    assert "Nothing to compress: one rank exchanges no gradients. Start as many" in output.replace("\n", " ")
    found = json.loads(path.read_text())
    assert found["world_size"] == 1 and found["compute"] > 0 and found["rows"] == []


def test_names_are_refused_before_anything_is_measured(app, tmp_path):
    with pytest.raises(UnknownNameError, match="deep, digits, small, text"):
        invoke(app, "txt")
    with pytest.raises(UnknownNameError, match="near-lossless"):
        invoke(app, "digits", "--fidelity", "good")
    with pytest.raises(UnknownNameError, match="threelc"):
        invoke(app, "digits", "--compressors", "threelx")
    module = tmp_path / "mine.py"
    module.write_text("def job(): ...\n")
    with pytest.raises(UnknownNameError, match="Known: job"):
        invoke(app, f"{module}:jobs")
