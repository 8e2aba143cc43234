"""`gradwire check` and `gradwire show` on what users write: in a file, in a module, or by a registered name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from gradwire.cli.app import build_app
from gradwire.cli.targets import codecs_of
from gradwire.compressors.base import registry
from gradwire.core.errors import GradwireError, OptionError, UnknownNameError
from gradwire.kernels.prefix_code import PrefixCode
from gradwire.testing import CHECKS

GOOD = """\
import gradwire as gw
from gradwire.lang import concat, floor, int8, random

@gw.compressor(feedback="none", unbiased=True)
def good_of_test(g, levels: int = 100):
    \"\"\"Stochastic levels of the largest magnitude.\"\"\"
    step = abs(g).reduce(max) / levels
    return concat(step=step, q=g.map(lambda x: floor(x / step + random()), dtype=int8))

@good_of_test.decode
def _(p):
    return p.q * p.step

ready = good_of_test(levels=50)
"""
# Rounds down, and says that it is unbiased; forgets the step.
BAD = GOOD.replace("+ random()", "").replace("good", "bad").replace("p.q * p.step", "p.q * p.step * 3")

# Subtractive dither: all ranks draw the same numbers, other ones in each step.
DITHERED = """\
import gradwire as gw
from gradwire.lang import concat, floor, int8, random

@gw.compressor(feedback="none")
def dithered_of_test(g):
    step = abs(g).reduce(max) / 100
    return concat(step=step, q=g.map(lambda x: floor(x / step + random(shared=True)), dtype=int8))

@dithered_of_test.decode
def _(p):
    return (p.q - random(shared=True) + 0.5) * p.step
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "good_compressors.py").write_text(GOOD)
    (tmp_path / "bad_compressors.py").write_text(BAD)
    (tmp_path / "dithered.py").write_text(DITHERED)
    (tmp_path / "empty.py").write_text("from gradwire.compressors import make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(registry.names())
    yield tmp_path
    for name in set(registry.names()) - before:
        registry.unregister(name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments)


def test_a_file_of_the_users_is_checked_line_by_line(folder: Path) -> None:
    result = run("check", "good_compressors.py:good_of_test", "--option", "levels=60")
    assert result.exit_code == 0, result.output
    first, *lines, last = result.output.splitlines()
    assert first == "good_of_test(levels=60)"
    assert all(line.startswith("ok ") for line in lines)
    assert "generated-code-for-the-cpu-gives-what-the-oracle-gives" in result.output
    assert last.startswith(f"{len(lines)} passed, 0 failed, {len(CHECKS) - len(lines)} do not apply, ")


def test_a_text_option_may_look_like_a_number() -> None:
    counts = np.zeros(256, np.int64)
    counts[:32] = 1
    digits = PrefixCode.of(counts).to_bytes().hex()
    assert registry.parse_option(f"table={digits}", "lossless")[1] != digits, "or this test needs another table"
    (codec,) = codecs_of("lossless", [f"table={digits}"]).values()
    assert codec.options["table"] == digits


def test_bytes_may_depend_on_the_step_without_random_rounding(folder: Path) -> None:
    result = run("check", "dithered.py:dithered_of_test", "--only", "randomness-depends-on-the-context-alone")
    assert result.exit_code == 0, result.output
    assert "1 passed" in result.output


def test_a_failure_says_what_and_how_to_run_it_again(folder: Path) -> None:
    result = run("check", "bad_compressors:bad_of_test", "-o", "levels=60")
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "unbiased is declared, but the mean of 400 draws is" in result.output
    again = "gradwire check bad_compressors:bad_of_test --option levels=60 --only unbiased-over-the-private-stream"
    assert f"To repeat: {again}\n" in result.output
    once_more = run(*again.split()[1:])
    assert once_more.exit_code == 1
    assert "0 passed, 1 failed, 0 do not apply" in once_more.output


@pytest.mark.parametrize(
    "target",
    ["good_compressors:ready", "./good_compressors.py:ready", "int8"],
)
def test_modules_instances_and_registered_names_are_targets_too(folder: Path, target: str) -> None:
    result = run("check", target, "--only", "strides-do-not-matter", "--only", "unusable-out-is-refused-with-advice")
    assert result.exit_code == 0, result.output
    assert "2 passed" in result.output


def test_all_compressors_of_a_file_are_checked(folder: Path) -> None:
    result = run("check", "good_compressors.py", "--only", "unusable-out-is-refused-with-advice")
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if "of_test(" in line] == [
        "good_of_test(levels=100)",
        "good_of_test(levels=50)",
    ]


def test_show_prints_every_compressor_of_a_file(folder: Path) -> None:
    assert run("show", "good_compressors.py").output.count("# good_of_test(levels=") == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "advice"),
    [
        (["good_compressors.py:goood_of_test"], UnknownNameError, "Did you mean 'good_of_test'"),
        (["threelcc"], UnknownNameError, "Did you mean 'threelc'"),
        (["missing.py:name"], GradwireError, "Give a file as path/to/file.py:NAME"),
        (["missing_module:name"], GradwireError, "Run the command in its folder, or give its file"),
        (["empty.py"], GradwireError, "empty.py defines no compressor. Decorate an encoder with @gradwire.compressor"),
        (["good_compressors.py:ready", "-o", "levels=3"], OptionError, "is good_of_test(levels=50), with its options"),
        (["int8", "--option", "block"], OptionError, "as in threelc:sparsity=1.75"),
        (["int8:blocks=3"], UnknownNameError, "Did you mean 'block'"),
        (["int8", "--option", "block=wide"], TypeError, "block must be an integer from 8 to 1048576, not 'wide'"),
        (["int8", "--option", "blocks=3"], UnknownNameError, "Did you mean 'block'"),
        (["good_compressors.py:good_of_test", "--option", "level=3"], UnknownNameError, "Did you mean 'levels'"),
        (["int8", "--only", "strides"], UnknownNameError, "Did you mean 'strides-do-not-matter'|Known: "),
    ],
)
def test_mistakes_get_advice(folder: Path, arguments: list[str], kind: type[Exception], advice: str) -> None:
    error = run("check", *arguments).exception
    assert isinstance(error, kind)
    assert any(part in str(error) for part in advice.split("|"))


def test_show_prints_the_code_with_lines_of_the_algorithm(folder: Path) -> None:
    result = run("show", "good_compressors.py:good_of_test")
    assert result.exit_code == 0
    assert "# payload: step float32 of scalar, q int8 of elements" in result.output
    assert "# good_compressors.py:7: step = abs(g).reduce(max) / levels" in result.output
    compile(result.output, "generated", "exec")
    triton = run("show", "good_compressors.py:good_of_test", "--backend", "triton")
    assert "import triton.language as tl" in triton.output
    assert "Known: cpu, triton" in str(run("show", "minmax", "--backend", "cuda").exception)


def test_show_of_what_is_written_by_hand_says_where_to_read_it() -> None:
    error = run("show", "threelc").exception
    assert "has no generated code. Read gradwire.compressors.threelc" in str(error)
