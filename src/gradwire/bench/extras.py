"""Packages needed only by the tools. A missing one raises an error that names the extra to install."""

from __future__ import annotations

import importlib.util

from gradwire.core.errors import MissingPackageError


def need(*packages: str, extra: str, purpose: str) -> None:
    """Check that packages can be imported, without importing them.

    Args:
        packages: Import names.
        extra: Extra of gradwire that installs them, or several, separated by commas.
        purpose: What needs them, as the object of a sentence.

    Raises:
        MissingPackageError: A package is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"The package {package!r} is not installed; {purpose} needs it. Run `pip install 'gradwire[{extra}]'`."
            )
