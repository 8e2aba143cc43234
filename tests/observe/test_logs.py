"""Logs of scalars: what each kind of target gets, and what becomes of a log whose target fails."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradwire.core.errors import OptionError, OptionTypeError
from gradwire.observe.logs import ScalarLog, writer_to

NAMES = ["gradwire/step", "gradwire/ratio"]


def scalars(step: int = 7) -> dict[str, float]:
    return {"gradwire/step": float(step), "gradwire/ratio": 2.5}


class SummaryWriterLike:
    """The method of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.calls.append((tag, scalar_value, global_step))


class RunLike:
    """The methods of a Weights & Biases run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [{}]  # the last one is not written yet
        self.metrics: list[tuple[str, str | None]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        assert step is None, "the run counts its own"
        self.rows[-1].update(data)
        if commit:
            self.rows.append({})


def test_a_summary_writer_gets_each_scalar_with_the_step() -> None:
    writer = SummaryWriterLike()
    writer_to(writer, NAMES)(scalars(), 7)
    assert writer.calls == [("gradwire/step", 7.0, 7), ("gradwire/ratio", 2.5, 7)]


def test_a_run_gets_rows_with_our_step_as_their_axis() -> None:
    run = RunLike()
    writer_to(run, NAMES)(scalars(), 7)
    run.log({"loss": 1.0})
    run.log({"loss": 0.5})
    assert run.rows == [scalars() | {"loss": 1.0}, {"loss": 0.5}, {}]
    assert run.metrics == [("gradwire/*", "gradwire/step")]


def test_a_csv_file_is_continued_with_the_same_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    writer_to(path, NAMES)(scalars(1), 1)
    writer_to(str(path), NAMES)(scalars(2), 2)
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [NAMES, ["1.0", "2.5"], ["2.0", "2.5"]]
    with pytest.raises(OptionError, match="other columns than these scalars"):
        writer_to(path, NAMES[:1])


def test_what_nothing_can_be_written_to_is_named() -> None:
    with pytest.raises(OptionTypeError, match="Pass the path of a CSV file, a SummaryWriter, a Weights & Biases run"):
        writer_to(3, NAMES)
    with pytest.raises(OptionError, match="every must be at least 1, but it is 0"):
        ScalarLog(print, 0, scalars, NAMES)


def test_it_writes_every_so_many_steps_and_what_is_left() -> None:
    steps: list[int] = []
    now = 0
    log = ScalarLog(lambda scalars, step: steps.append(step), 5, lambda: scalars(now), NAMES)
    for now in range(1, 13):
        log.step(now)
    log.close(12)
    log.close(12)
    log.step(20)
    assert steps == [5, 10, 12]


def test_a_target_that_raises_ends_its_log_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def full(scalars: Mapping[str, float], step: int) -> None:
        calls.append(step)
        raise OSError("no space left on device")

    log = ScalarLog(full, 1, scalars, NAMES)
    for step in range(1, 4):
        log.step(step)
    log.close(3)
    assert calls == [7]
    assert [record.message for record in caplog.records] == ["Scalars could not be written in step 1. This log ends."]
    assert "no space left" in caplog.text
