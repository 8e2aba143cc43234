"""The frameworks: their packages, and the oldest versions that tests have run with."""

from __future__ import annotations

from importlib import metadata
from itertools import takewhile

from gradwire.core.errors import MissingPackageError

OLDEST = {"accelerate": "1.15", "transformers": "5.23", "lightning": "2.6"}


def require(package: str, purpose: str) -> None:
    """Check that a package is installed and new enough, without importing it.

    Args:
        package: A key of `OLDEST`.
        purpose: What needs it, as the subject of a sentence.

    Raises:
        MissingPackageError: It is missing or too old.
    """
    oldest = OLDEST[package]
    advice = f"Run `pip install '{package}>={oldest}'`."
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingPackageError(f"{purpose} needs the package {package}, which is not installed. {advice}") from None
    if _numbers(found) < _numbers(oldest):
        raise MissingPackageError(
            f"{purpose} needs {package} {oldest} or newer, but version {found} is installed. {advice}"
        )


def _numbers(version: str) -> list[int]:
    """The leading numbers of a version: ``"2.6.0rc1"`` gives 2, 6 and 0."""
    digits = ("".join(takewhile(str.isdigit, part)) for part in version.split("."))
    return [int(each) for each in takewhile(bool, digits)]
