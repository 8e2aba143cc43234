"""Errors of user code are shown with the user's lines and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.bench.users import UserCodeError, load_module, users_code
from gradwire.core.errors import GradwireError, OptionError

CHAIN = """\
def fails():
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("no data") from error
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_chain_of_errors_is_shown_whole(folder: Path) -> None:
    (folder / "chain_of_users.py").write_text(CHAIN)
    module = load_module("chain_of_users")
    with pytest.raises(UserCodeError) as caught, users_code("The job"):
        module.fails()
    lines = str(caught.value).splitlines()
    assert lines[0] == "The job failed."
    assert f'  File "{folder}/chain_of_users.py", line 3, in fails' in lines
    assert "KeyError: 'key'" in lines
    assert lines[-1] == "RuntimeError: no data"


def test_what_gradwire_says_on_purpose_passes() -> None:
    with pytest.raises(OptionError, match=r"^as it is$"), users_code("The job"):
        raise OptionError("as it is")


def test_an_error_of_gradwire_s_own_code_shows_the_line_that_calls_it(folder: Path) -> None:
    (folder / "names_of_users.py").write_text("from gradwire.compressors import register\n\nregister(3)\n")
    with pytest.raises(UserCodeError) as caught:
        load_module("names_of_users.py")
    assert 'names_of_users.py", line 3' in str(caught.value)
    assert "registry.py" not in str(caught.value)
    assert "3 is not a subclass of gradwire.Compressor" in str(caught.value)


def test_half_a_module_is_not_kept(folder: Path) -> None:
    (folder / "half_of_users.py").write_text("whole = 1 / 0\n")
    for place in ("half_of_users.py", "half_of_users", "half_of_users.py"):
        with pytest.raises(UserCodeError, match="division by zero"):
            load_module(place)


def test_syntax_errors_show_their_line(folder: Path) -> None:
    (folder / "syntax_of_users.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserCodeError, match=r'syntax_of_users.py", line 2\n    def f\(:\n'):
        load_module("syntax_of_users.py")


@pytest.mark.parametrize("place", ["", ".", "no_such_module", "gradwire.no_such_module", "a b", "..x"])
def test_a_module_that_there_is_not_is_no_error_of_the_users_code(folder: Path, place: str) -> None:
    with pytest.raises(GradwireError, match=r"There is no module .* give its file") as caught:
        load_module(place)
    assert not isinstance(caught.value, UserCodeError)


def test_a_missing_import_within_the_users_module_is_theirs(folder: Path) -> None:
    (folder / "importing_of_users.py").write_text("import no_such_module\n")
    with pytest.raises(UserCodeError, match=r"line 1, in <module>(.|\n)*No module named 'no_such_module'"):
        load_module("importing_of_users")
