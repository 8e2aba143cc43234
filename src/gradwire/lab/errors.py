"""The error of a lab that failed although it was permitted. Missing rights raise `RightsError`."""

from __future__ import annotations

from gradwire.core.errors import GradwireError


class LabError(GradwireError, RuntimeError):
    """The lab could not be built, or a command in it failed. The message names the host and the failure."""
