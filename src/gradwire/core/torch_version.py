"""The oldest torch that gradwire runs with."""

from __future__ import annotations

import torch

from gradwire.core.errors import MissingPackageError
from gradwire.core.versions import numbers_of

LEAST_TORCH = (2, 4)
"""As in the requirements of the package. No feature asks for a newer one (docs/versions.md)."""


def check_torch() -> None:
    """Check that torch is new enough. pip does so, too, but not for a torch that is installed afterwards.

    Raises:
        MissingPackageError: torch is too old.
    """
    if numbers_of(torch.__version__) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise MissingPackageError(
            f"gradwire needs torch {least} or newer, but version {torch.__version__} is installed. "
            f"Run `pip install 'torch>={least}'`."
        )
