"""The code blocks of README.md and docs/, and what the comment above a block says about running it.

A comment such as ``<!-- with: attached; ci -->`` directly above a block is not shown on the page. Marks:

- ``skip: REASON``: the block does not run, and the tests list it with the reason;
- ``with: NAME``: a Python block that is part of a script. `tests.docs.setups` has the rest of that script;
- ``after: previous``: it goes on where the last Python block of the page has ended;
- ``until: TEXT``: a command that does not end by itself. It is stopped when it has printed this;
- ``prints: TEXT``: the output of a command contains this;
- ``in: PAGE``: a command that runs in the folder of another page, because it needs a file of it;
- ``host: ADDRESS``: with ``until``, each server of the block runs on a host whose interface eth0 has this address;
- ``root``, ``bpf``, ``frameworks`` and ``ci``: markers of the test.

A Python block with a title is a file, which a later command of the page runs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<marks>[^\n]*?) -->\n(?P=indent))?"
    r"```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<source>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = {"skip", "with", "after", "until", "prints", "in", "host", "root", "bpf", "frameworks", "ci"}


class Block(NamedTuple):
    """A code block: page and line, language, title, source and marks."""

    page: str
    line: int
    language: str
    title: str
    source: str
    marks: dict[str, str]

    @property
    def name(self) -> str:
        """Where it is, as the id of its test."""
        return f"{self.page}:{self.line}"

    @property
    def place(self) -> str:
        """Name of the folder that the blocks of a page share."""
        return self.marks.get("in", self.page).replace("/", "_")


def blocks_of(path: Path) -> Iterator[Block]:
    """All code blocks of a page."""
    text = path.read_text()
    for match in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        marks = {name: value for name, _, value in (mark.strip().partition(": ") for mark in _split(match["marks"]))}
        yield Block(
            path.relative_to(ROOT).as_posix(),
            text[: match.start("source")].count("\n"),
            match["language"],
            title[1] if title else "",
            textwrap.dedent(match["source"]),
            marks,
        )


def _split(marks: str | None) -> list[str]:
    return marks.split(";") if marks else []


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
