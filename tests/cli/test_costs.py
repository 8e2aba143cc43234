"""Costs that are measured first: a line for each codec, and nothing where nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.cli.costs import costs_of
from gradwire.simulate import machine
from tests.simulate.costs import costs, onebit


def test_what_is_measured_is_said_and_what_is_known_is_not(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("GRADWIRE_CACHE_DIR", str(tmp_path))
    path = machine.default_path()
    path.write_text(replace(costs(onebit=onebit()), made_by=machine._stamp()).to_json())
    measured = costs_of(None, ["fp16", "onebit"])
    said = "Measuring codecs on one core of this machine; they are compiled at first use. The figures are kept in"
    assert capsys.readouterr().err.splitlines() == [f"{said} {path}.", "Measuring fp16…"]
    assert costs_of(None, ["fp16"]) == measured == costs_of(path, [])
    assert capsys.readouterr().err == ""
