"""The error of a lab that was permitted but did not work; missing rights are `RightsError`."""

from __future__ import annotations

from gradwire.core.errors import GradwireError


class LabError(GradwireError, RuntimeError):
    """The lab could not be built, or a command in it failed; the message says which host and how."""
