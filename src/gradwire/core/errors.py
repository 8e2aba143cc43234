"""The exceptions that gradwire raises.

Every message says what is wrong, with the value, and what to do. Errors about a caller's input are also `ValueError` or
`TypeError`, so that code without knowledge of gradwire handles them as usual.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NO_TENSOR = "none"  # `SyncError.tensor` of errors between steps
# For "3lc" and "1bit", which are threelc and onebit here.
_SPELLING = str.maketrans({"1": "one", "2": "two", "3": "three"})


class GradwireError(Exception):
    """Base class of all exceptions that gradwire raises on purpose."""


class UnknownNameError(GradwireError, ValueError):
    """An unknown name of a compressor, an option or a strategy. The message lists the known names."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        known = sorted(known)
        close = nearest(str(name), known)
        hint = f" Did you mean {close!r}?" if close else ""
        super().__init__(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known) or 'none'}.")


class OptionError(GradwireError, ValueError):
    """An option with a value out of range."""


class OptionTypeError(GradwireError, TypeError):
    """An option or another argument of the wrong type."""


class AttachError(GradwireError, RuntimeError):
    """`gradwire.attach` does not support this module, optimizer or process group."""


class DisagreementError(GradwireError, RuntimeError):
    """Ranks differ in method, shapes, order or world size. Raised on every rank before data is sent."""


class StateError(GradwireError, RuntimeError):
    """Saved state is damaged, incomplete, from another job, or locked by another process."""


class StatusError(GradwireError, ValueError):
    """A file is not the status of a rank, as `gradwire top` reads it."""


class PayloadError(GradwireError, ValueError):
    """Received bytes are not a payload of the expected tensor. The only error that decoders raise for their input."""


class StateMismatchError(PayloadError):
    """A payload was encoded with other parameters or another optimizer state than this rank has, as its digest says."""


class FrameError(PayloadError):
    """Received bytes are not a frame, or not the expected one."""


class SyncError(GradwireError, RuntimeError):
    """A synchronization ended without a result.

    Attributes:
        rank: Rank that caused the error, or None if unknown.
        tensor: Name of the tensor or fusion group in flight; ``"none"`` between steps.
        phase: Task that was waited for, for example ``"recv scatter"``.
        dump: Path of the flight recorder's file, once it is written.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, tensor: str | None = None, phase: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.tensor = tensor
        self.phase = phase
        self.dump: str | None = None


class PeerTimeoutError(SyncError):
    """A rank gave no sign of life within `timeout`, or did not join the step within `stall_timeout`."""


class PeerLostError(SyncError):
    """The connection to a rank was closed: its process ended, or the network dropped it."""


class PeerFailedError(SyncError):
    """Another rank failed first. The message is that rank's."""


class ReplicaError(SyncError):
    """The replica check found ranks whose parameters differ in at least one bit."""


class ServerStoppedError(SyncError):
    """A server was stopped before its workers had finished."""


class RightsError(GradwireError, PermissionError):
    """The system denies a permission that a tool needs. The message says which, and how to get it."""


class MissingPackageError(GradwireError, ImportError):
    """A package that a tool or a framework's module needs is missing or too old. The message says what to install."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, ignoring case and the spelling of digits; None if none is close."""
    spelled = {_spelled(each): each for each in known}
    close = difflib.get_close_matches(_spelled(name), spelled, n=1)
    return spelled[close[0]] if close else None


def _spelled(name: str) -> str:
    return name.lower().translate(_SPELLING)
