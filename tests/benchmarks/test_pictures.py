"""The committed pictures of README and gallery show what the committed records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gallery, readme_picture


def texts(path: Path) -> list[str]:
    """What is written in a picture, the figures of its bars among it. matplotlib repeats drawn letters in comments."""
    written = re.findall(r"<text[^>]*>([^<]*)</text>|<!-- (.*?) -->", path.read_text())
    assert written
    return ["".join(each) for each in written]


@pytest.mark.parametrize("name", gallery.PICTURES)
@pytest.mark.parametrize("theme", gallery.THEMES)
def test_the_gallery_is_that_of_its_records(name: str, theme: str, tmp_path: Path) -> None:
    drawn = gallery.draw(name, theme, tmp_path)
    assert texts(drawn) == texts(gallery.FOLDER / drawn.name), "Run python -m benchmarks.gallery."


@pytest.mark.parametrize("theme", readme_picture.THEMES)
def test_the_readmes_picture_is_that_of_its_record(theme: str, tmp_path: Path) -> None:
    drawn = tmp_path / f"results-{theme}.svg"
    readme_picture.draw(list(readme_picture.bars()), readme_picture.THEMES[theme], drawn)
    assert texts(drawn) == texts(readme_picture.FOLDER / drawn.name), "Run python -m benchmarks.readme_picture."
