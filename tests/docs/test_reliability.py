"""docs/reliability.md: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
PROMISES = [
    *(f"A{number}" for number in range(1, 8)), *(f"B{number}" for number in range(1, 10)),
    *(f"C{number}" for number in range(1, 6)), *(f"D{number}" for number in range(1, 8)), "E1", "E2", "E3",
    *(f"F{number}" for number in range(1, 8)), *(f"H{number}" for number in range(1, 6)),
]  # fmt: skip


def test_every_promise_names_its_tests_and_they_exist() -> None:
    rows = re.findall(r"^\| ([A-H]\d) \|(.*)\|(.*)\|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == PROMISES
    for name, _, held_by in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held_by)
        assert tests, name
        for path, test in tests:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{name}: {path}::{test}"
