"""Notices are printed if logging is not configured, and otherwise only logged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradwire.observe import notices
from gradwire.observe.notices import seldom

TOLD = "gradwire: auto: 100 % decided\n"


def printed(before: str, **env: str) -> str:
    """Return what a process without pytest's handlers prints to standard error."""
    code = f"import logging, sys; {before}; from gradwire.observe.notices import tell; tell('auto: 100 % decided')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_without_configuration_a_notice_goes_to_standard_error() -> None:
    assert printed("0") == printed("0", GRADWIRE_QUIET="0") == TOLD
    assert printed("logging.getLogger('gradwire').setLevel('INFO')") == TOLD


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_notices_are_only_logged_if_logging_is_configured(level: str) -> None:
    logged = "INFO:gradwire:auto: 100 % decided\n" if level == "INFO" else ""
    assert printed(f"logging.basicConfig(level='{level}')") == logged
    own = f"own = logging.getLogger('gradwire'); own.setLevel('{level}'); own.addHandler(logging.StreamHandler())"
    assert printed(own) == logged.removeprefix("INFO:gradwire:")


@pytest.mark.parametrize(
    "silenced",
    [
        "logging.getLogger('gradwire').setLevel('WARNING')",
        "logging.getLogger('gradwire').addHandler(logging.NullHandler())",
        "logging.disable(logging.INFO)",
    ],
)
def test_it_can_be_silenced(silenced: str) -> None:
    assert printed(silenced) == ""


def test_the_environment_silences_it() -> None:
    assert printed("0", GRADWIRE_QUIET="1") == ""


def test_progress_messages_are_limited(monkeypatch) -> None:
    times = iter((100.0, 100.5, 101.9, 102.0, 102.0, 103.9, 104.1, 104.1))
    monkeypatch.setattr(notices.time, "monotonic", lambda: next(times))
    said: list[str] = []
    say = seldom(said.append, seconds=2.0)
    for name in "abcde":
        say(name)
    assert said == ["c", "e"]
