"""SECURITY.md: every promise names its tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_promise_names_its_tests_and_they_exist() -> None:
    rows = re.findall(r"^\|(.*)\|(.*)\|$", PAGE.partition("## Promises")[2], re.MULTILINE)
    assert len(rows) > 10
    for promise, tests in rows[2:]:
        assert re.findall("`tests/[^`]+`", tests), promise


def test_what_it_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert named
    assert [each for each in named if not (ROOT / each).exists()] == []
