"""The callback of Transformers' Trainer, with the real package: what it logs, and what it resumes from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import jobs
from tests.trainers.support import on_two_ranks

pytestmark = [pytest.mark.ci, pytest.mark.frameworks, pytest.mark.timeout(400)]


def history(folder: Path, step: int) -> list[dict[str, Any]]:
    """The Trainer's log in a checkpoint, which must be JSON in the strict sense."""

    def refuse(name: str) -> None:
        pytest.fail(f"{name} was logged")

    text = (folder / f"checkpoint-{step}" / "trainer_state.json").read_text()
    found: list[dict[str, Any]] = json.loads(text, parse_constant=refuse)["log_history"]
    return found


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"logging_strategy": "steps", "logging_steps": 2, "logging_first_step": True}, [1, 2, 4, 6, 8]),
        ({"logging_strategy": "epoch"}, [4, 8]),
        ({"logging_strategy": "epoch", "gradient_accumulation_steps": 2}, [2, 4]),
    ],
)
def test_scalars_are_logged_once_in_each_step_with_a_loss_and_the_loss_too(
    arguments: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    on_two_ranks("huggingface", folder=str(tmp_path), **arguments)
    entries = history(tmp_path, steps[-1])
    assert [entry["step"] for entry in entries if "loss" in entry] == steps
    ours = [entry for entry in entries if "gradwire/step" in entry]
    assert [entry["step"] for entry in ours] == steps
    assert all(entry["gradwire/sent_bytes"] > 0 for entry in ours)


def test_scalars_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    on_two_ranks("huggingface", folder=str(tmp_path), method="auto", logging_steps=1)
    first, *_ = [entry for entry in history(tmp_path, 8) if "gradwire/step" in entry]
    assert first["gradwire/auto/decisions"] == 0
    assert "gradwire/auto/step_ms" not in first


def loaded_from(caplog: pytest.LogCaptureFixture, folder: Path, **parameters: Any) -> list[str]:
    """What one process says about residuals when it resumes for one more epoch."""
    with caplog.at_level(logging.INFO, "gradwire"):
        jobs.huggingface(str(folder), epochs=2, logging_strategy="epoch", **parameters)
    return [record.message for record in caplog.records if "esiduals" in record.message]


def loaded(folder: Path) -> list[str]:
    return [f"Residuals of all ranks were loaded from {folder / 'checkpoint-8' / 'gradwire.pt'}."]


@pytest.mark.parametrize("nan", [False, True])
def test_a_checkpoint_is_recognized_by_its_history_even_with_nan_in_it(
    nan: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate(("own", "other")):
        jobs.huggingface(str(tmp_path / name), epochs=1, seed=seed, nan=nan and name == "own", logging_strategy="epoch")
    own = tmp_path / "own"
    assert ("NaN" in (own / "checkpoint-8" / "trainer_state.json").read_text()) == nan
    said = loaded_from(
        caplog, own, nan=nan, resume_from_checkpoint=str(own / "checkpoint-8"),
        resume_from=str(tmp_path / "other" / "checkpoint-8"),
    )  # fmt: skip
    assert said == loaded(own)


def test_true_stands_for_the_last_checkpoint_in_the_folder_of_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.huggingface(str(tmp_path), epochs=1)
    assert loaded_from(caplog, tmp_path, resume_from_checkpoint=True) == loaded(tmp_path)
