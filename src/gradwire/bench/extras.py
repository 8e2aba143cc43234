"""Packages that only the tools need: where one is missing, a message that names the extra to install."""

from __future__ import annotations

import importlib.util

from gradwire.core.errors import GradwireError


class MissingPackageError(GradwireError, ImportError):
    """A package of an extra is not installed; the message has the command that installs it."""


def need(*packages: str, extra: str, purpose: str) -> None:
    """Check that packages can be imported, without importing them.

    Args:
        packages: import names.
        extra: the extra, or extras, of gradwire that bring them.
        purpose: what wants them, as the end of a sentence.

    Raises:
        MissingPackageError: one is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"Expected the package {package!r} for {purpose}, got none. Do `pip install 'gradwire[{extra}]'`."
            )
