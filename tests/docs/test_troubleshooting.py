"""docs/troubleshooting.md: every message that it quotes is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
GAP = "\0"  # where a message has a name or a number


def texts() -> Iterator[str]:
    """All strings of the package, as they stand in calls, with gaps."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdg]", GAP, node.value)


TEXTS = [re.sub(r"\s+", " ", text) for text in texts()]


def is_in(quoted: str, text: str) -> bool:
    """Whether the parts of a quotation are in a text, in order, with gaps between them."""
    if not all(part in text for part in quoted.split("…")):
        return False
    parts = [re.escape(part) for part in quoted.split("…")]
    between = f".*?{GAP}.*?"
    return re.search(between.join(parts), text) is not None


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_source_has_the_message(quoted: str) -> None:
    assert any(is_in(quoted, text) for text in TEXTS)


def test_a_message_that_changes_is_found() -> None:
    assert not any(is_in("This module is attached already.", text) for text in TEXTS)
    assert not is_in("has … ranks", "has ranks")
