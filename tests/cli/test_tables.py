from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gradwire.cli.app import build_app
from gradwire.lang import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_CACHE_DIR", str(tmp_path))
    cache.folder.cache_clear()
    yield tmp_path / "tables"
    cache.folder.cache_clear()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["tables", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_is_the_table_and_its_cost_and_is_kept(folder) -> None:
    found = json.loads(run("--bits", "4", "--granularity", "30", "--p", "0.03125", "--json"))
    assert found.keys() == {"table", "cost"}
    assert found["table"] == [0, 3, 5, 7, 9, 11, 13, 14, 15, 17, 19, 21, 23, 25, 27, 30]
    assert found["cost"] == pytest.approx(0.0130625, abs=5e-8)
    assert len(list(folder.glob("*.json"))) == 1
    assert json.loads(run("--bits", "4", "--granularity", "30", "--json")) == found


def test_people_get_a_table_with_places_and_lanes(folder) -> None:
    output = run("--bits", "2", "--granularity", "8", "--ranks", "40")
    assert "2 bits, granularity 8" in output
    assert "-2.1539" in output
    assert "accumulators of 16 bits at 40 ranks" in output
    assert str(folder) in output.replace("\n", "")


def test_the_granularity_is_chosen_for_the_ranks() -> None:
    assert len(json.loads(run("--ranks", "17", "--json"))["table"]) == 16
    assert json.loads(run("--ranks", "17", "--json"))["table"][-1] == 15
    assert len(json.loads(run("--ranks", "64", "--json"))["table"]) == 16


def test_what_is_impossible_is_said(folder) -> None:
    result = CliRunner().invoke(build_app(), ["tables", "--granularity", "14"])
    assert result.exit_code != 0
    assert "granularity must be from 15" in str(result.exception)
