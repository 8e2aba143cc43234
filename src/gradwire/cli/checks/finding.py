"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"


class Finding(NamedTuple):
    """One line of the doctor's answer.

    Attributes:
        status: ``"ok"``; ``"note"``: a job can run, but something is missing or slow; ``"problem"``: no job can run.
        name: What was looked at.
        text: What was found.
        advice: What to do about it.
    """

    status: Literal["ok", "note", "problem"]
    name: str
    text: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def run_check(check: Check) -> list[Finding]:
    """Return the findings of a check. One that fails itself is a note."""
    try:
        return list(check())
    except Exception as error:  # a strange machine must not keep the other checks from being made
        name = check.__name__.replace("_", " ")
        return [Finding(NOTE, name, f"The check failed: {type(error).__name__}: {error}", "Please report this.")]
