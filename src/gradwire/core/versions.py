"""Compare versions of packages."""

from __future__ import annotations

from itertools import takewhile


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``"2.6.0rc1+cpu"`` gives 2, 6 and 0."""
    digits = ("".join(takewhile(str.isdigit, part)) for part in version.split("."))
    return tuple(int(each) for each in takewhile(bool, digits))
