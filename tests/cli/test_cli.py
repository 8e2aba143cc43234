import subprocess
import sys

import pytest

from gradwire import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gradwire.cli", *arguments], capture_output=True, text=True)


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


def test_an_error_of_ours_has_no_traceback():
    done = run("lab", "--rate", "100mbps", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("gradwire: Expected a rate in bits a second")
    assert "Traceback" not in done.stderr
