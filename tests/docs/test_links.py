"""Links and paths in Markdown lead to files, and the site has every page. `make docs` checks anchors, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    inside = [link for link in links if link and not link.startswith(("https://", "http://", "mailto:"))]
    missing = [link for link in inside if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w./-]+\.md", navigation))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set()


def test_every_picture_has_both_color_schemes() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        light, dark = (
            re.findall(rf"\]\(([^)]+)-{scheme}\.svg#only-{scheme}\)", page.read_text()) for scheme in ("light", "dark")
        )
        assert light == dark, page
