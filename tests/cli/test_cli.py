import contextlib
import io
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gradwire
from gradwire import cli
from gradwire.cli.app import build_app


def run(*arguments: str, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gradwire.cli", *arguments], capture_output=True, text=True, **how)


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command line says of arguments, as a whole, in this process."""
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    output = io.StringIO()
    with contextlib.redirect_stderr(output), pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    return output.getvalue()


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "pip install 'gradwire[cli]'" in capsys.readouterr().err


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    assert "lab" in done.stdout


def test_the_version_is_printed():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"gradwire {gradwire.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "broken.py"],
        ["show", "broken.py:mine"],
        ["serve", "--parameters", "--workers", "1", "--import", "broken"],
    ],
)
def test_an_error_of_the_users_code_is_shown_as_theirs(tmp_path, monkeypatch, arguments):
    (tmp_path / "broken.py").write_text("import gradwire\nvalue = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    error = refused(monkeypatch, *arguments)
    first, place, *_, last = error.splitlines()
    assert first.startswith("gradwire: Importing broken")
    assert place == f'  File "{tmp_path}/broken.py", line 2, in <module>'
    assert last == "ZeroDivisionError: division by zero"
    assert "Traceback" not in error and "importlib" not in error


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["bench", "kernels", "--size", "0"], "greater than or equal to 1"),
        (["bench", "kernels", "--size", "1", "--only", "sort"], "Unknown kernel 'sort'"),
        (["bench", "compressors", "--repeats", "0"], "greater than or equal to 1"),
        (["bench", "compressors", "--only", "topkk"], "Unknown compressor 'topkk'"),
        (["bench", "training", "--buckets", "-1"], "Give sizes above 0"),
        (["bench", "training", "--workload", "texts"], "Unknown workload 'texts'. Did you mean 'text'"),
        (["demo", "--workload", "foo"], "Unknown workload 'foo'. Known: blocks, deep, digits, small, text"),
        (["demo", "--workload", "gradwire.bench.digits.Digit=x"], "Write MODULE.CLASS=PATH"),
        (["lab", "--timeout", "-1", "--", "true"], "greater than or equal to 0"),
        (["serve", "--workers", "1", "--parameters", "--port", "70000"], "less than or equal to 65535"),
        (["serve", "--workers", "1", "--parameters", "--optimizer", "Mine"], "such as my_module.MyOptimizer"),
        (["serve", "--workers", "1", "--parameters", "--optimizer", "torch.optim.None"], "Use one of torch.optim"),
        (["simulate", "--plot", "plot.xyz"], "End it in"),
        (["simulate", "--method", "onebit@star"], "Unknown strategy 'star'"),
        (["simulate", "--latency", "5"], "Known units: us, ms, s"),
        (["simulate", "--bucket", "-1"], "greater than or equal to 0.001"),
        (["tables", "--ranks", "0"], "greater than or equal to 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_advice_before_anything_runs(arguments, advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert advice in " ".join(refused(monkeypatch, *arguments).replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--csv", "--plot", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(option, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(build_app(), ["simulate", option, str(tmp_path / "file" / "below.png")])
    assert result.exit_code == 2
    assert "below.png cannot be written" in result.output
    folder = CliRunner().invoke(build_app(), ["simulate", option, str(tmp_path)])
    assert "is a folder. Name a file in it" in folder.output


def test_an_error_of_ours_has_no_traceback():
    done = run("lab", "--rate", "100mbps", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("gradwire: tc reads the rate")
    assert "Traceback" not in done.stderr
