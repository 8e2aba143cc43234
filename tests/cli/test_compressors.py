from __future__ import annotations

import json

from typer.testing import CliRunner

from gradwire import compressors
from gradwire.cli.app import build_app


def test_every_compressor_is_listed_with_its_options() -> None:
    result = CliRunner().invoke(build_app(), ["compressors"])
    assert result.exit_code == 0
    for name in compressors.names():
        assert f"\n{name} " in "\n" + result.output
    assert "options: sparsity=1.0, zero_run=True" in result.output


def test_json_is_for_machines() -> None:
    rows = json.loads(CliRunner().invoke(build_app(), ["compressors", "--json"]).output)
    assert [row["name"] for row in rows] == compressors.names()
    threelc = next(row for row in rows if row["name"] == "threelc")
    assert 1.6 <= threelc["max_bits"] < 1.61
    assert threelc["default_feedback"] == "error"
