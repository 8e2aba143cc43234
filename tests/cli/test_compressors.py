from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gradwire import compressors
from gradwire.cli import compressors as command
from gradwire.cli.app import build_app


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return json.loads(CliRunner().invoke(build_app(), ["compressors", "--json"]).output)


def test_every_compressor_is_listed_with_its_options() -> None:
    result = CliRunner().invoke(build_app(), ["compressors"])
    assert result.exit_code == 0
    for name in compressors.names():
        assert f"\n{name} " in "\n" + result.output
    assert "options: sparsity=1.0, zero_run=True" in result.output


def test_those_in_the_language_tell_what_they_took_to_write() -> None:
    output = CliRunner().invoke(build_app(), ["compressors"]).output
    assert "8 lines, 1 function: concat, extract, filter, map, reduce, scatter\n" in output


def test_json_is_for_machines(rows) -> None:
    assert [row["name"] for row in rows] == compressors.names()
    threelc = next(row for row in rows if row["name"] == "threelc")
    assert 1.6 <= threelc["max_bits"] < 1.61
    assert threelc["default_feedback"] == "error"


def test_lines_functions_and_operators_are_null_outside_the_language(rows) -> None:
    found = {row["name"]: row for row in rows}
    assert found["none"]["lines"] is found["none"]["functions"] is found["none"]["operators"] is None
    assert 3 < found["dgc"]["lines"] < 29
    assert {"sample", "sort", "filter"} < set(found["dgc"]["operators"])
    assert found["natural"]["functions"] == 2


def test_a_terminal_gets_a_table(rows) -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(command._table(rows))
    lines = console.file.getvalue().splitlines()
    for row in rows:
        line = next(line for line in lines if line.split()[:1] == [row["name"]])
        assert f"{row['max_bits']:.2f}" in line
    assert max(map(len, lines)) <= 160
