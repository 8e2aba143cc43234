"""What a release states in several places is the same everywhere."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import gradwire

ROOT = Path(__file__).parents[2]
CITATION = (ROOT / "CITATION.cff").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{gradwire.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^version: {re.escape(gradwire.__version__)}$", CITATION, re.MULTILINE)
    (newest,) = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert newest == gradwire.__version__


def test_the_citation_has_the_papers_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text()
    named = re.findall(r"\((MLSys|SOSP|NSDI|SoCC|ICML) (\d{4})\)", readme)
    assert len(named) == 5
    assert [each for each in named if f"({each[0]} {each[1]})" not in CITATION] == []


def test_the_package_ships_its_types() -> None:
    assert (Path(gradwire.__file__).parent / "py.typed").is_file()
    assert metadata("gradwire")["License-Expression"] == "Apache-2.0"
