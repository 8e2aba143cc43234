"""The frameworks: their packages, and the oldest versions that tests have run with."""

from __future__ import annotations

from importlib import metadata

from gradwire.core.errors import MissingPackageError
from gradwire.core.versions import numbers_of

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
    if numbers_of(found) < numbers_of(oldest):
        raise MissingPackageError(
            f"{purpose} needs {package} {oldest} or newer, but version {found} is installed. {advice}"
        )
