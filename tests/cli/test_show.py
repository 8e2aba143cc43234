from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradwire import compressors
from gradwire.cli import show
from gradwire.cli.app import build_app
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.lang.targets import numba, triton


@pytest.mark.parametrize(("backend", "emit"), [("cpu", numba.emit), ("triton", triton.emit)])
def test_the_source_is_what_runs(backend: str, emit) -> None:
    result = CliRunner().invoke(build_app(), ["show", "minmax", "--backend", backend, "--option", "bits=4"])
    assert result.exit_code == 0
    codec = compressors.make("minmax", bits=4)
    assert isinstance(codec, TracedCompressor)
    assert result.output.endswith(emit(codec.program))
    assert result.output.startswith("# minmax(bits=4): ")
    ast.parse(result.output)


def test_the_payload_is_described_with_what_shortens_it() -> None:
    result = CliRunner().invoke(build_app(), ["show", "ternary", "--option", "zero_run=true"])
    assert "# payload: M float32 of scalar, q trit of elements with zero_runs\n" in result.output
    assert "q_bytes = shorten_runs(q_out, " in result.output


def test_what_is_written_by_hand_gets_the_names_of_what_is_not() -> None:
    error = CliRunner().invoke(build_app(), ["show", "threelc"]).exception
    assert "has no generated code" in str(error)
    listed = str(error).rsplit(": ", 1)[1].rstrip(".").split(", ")
    assert {"int8", "minmax", "onebit"} <= set(listed)
    assert "threelc" not in listed


def test_unknown_names_get_the_known_ones() -> None:
    for arguments in (["show", "minmaxx"], ["show", "minmax", "--backend", "tritn"]):
        assert "Did you mean" in str(CliRunner().invoke(build_app(), arguments).exception)


def test_a_terminal_gets_colors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    show.show("minmax", backend="triton")
    assert "\x1b[" in capsys.readouterr().out


def test_showing_triton_source_needs_no_triton() -> None:
    code = "import sys; from gradwire.cli.show import show; show('minmax', backend='triton'); "
    code += "assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
