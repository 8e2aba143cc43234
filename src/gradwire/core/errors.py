"""The exceptions that gradwire raises.

Every message says what is wrong, with the value, and what to do. Errors about a caller's input are also `ValueError`s
or `TypeError`s, so that code which knows nothing of gradwire handles them as usual.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# "3lc" and "1bit" are in use for what is threelc and onebit here.
_SPELLING = str.maketrans({"1": "one", "2": "two", "3": "three"})


class GradwireError(Exception):
    """Base of everything that gradwire raises on purpose."""


class UnknownNameError(GradwireError, ValueError):
    """A name (of a compressor, an option, a strategy) that is not known; the message lists the known ones."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        known = sorted(known)
        close = nearest(str(name), known)
        hint = f" Did you mean {close!r}?" if close else ""
        super().__init__(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known) or 'none'}.")


class OptionError(GradwireError, ValueError):
    """An option whose value is out of range."""


class OptionTypeError(GradwireError, TypeError):
    """An option, or another argument, of the wrong type."""


class AttachError(GradwireError, RuntimeError):
    """`gradwire.attach` cannot do what was asked for with this module, optimizer or process group."""


class DisagreementError(GradwireError, RuntimeError):
    """Ranks differ in method, shapes, order or world size. Raised on every rank, before data is sent."""


class StateError(GradwireError, RuntimeError):
    """Saved state that cannot be used: damaged, incomplete, of another job, or held by another process."""


class PayloadError(GradwireError, ValueError):
    """Received bytes that are not a payload of the expected tensor: the one error of every decoder."""


class FrameError(PayloadError):
    """Received bytes that are not a frame, or a frame that is not the expected one."""


class SyncError(GradwireError, RuntimeError):
    """A synchronization ended without a result. Names the rank, the tensor and the phase.

    Attributes:
        rank: the rank that is to blame, or None where that is not known.
        tensor: the name of the tensor (or group of tensors) in flight.
        phase: what was waited for, for example ``"recv scatter"``.
        dump: path of the flight recorder's file, once written.
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
    """The connection to a rank closed: its process has ended, or the network dropped it."""


class PeerFailedError(SyncError):
    """Another rank failed first and said so; the message is that rank's."""


class ReplicaError(SyncError):
    """The replica check found ranks whose parameters differ in at least one bit."""


class ServerStoppedError(SyncError):
    """Somebody stopped a server before its workers had finished."""


class RightsError(GradwireError, PermissionError):
    """The system does not permit what a tool needs; the message says which right and how to get it."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, whatever its case and however its digits are spelled."""
    spelled = {_spelled(each): each for each in known}
    close = difflib.get_close_matches(_spelled(name), spelled, n=1)
    return spelled[close[0]] if close else None


def _spelled(name: str) -> str:
    return name.lower().translate(_SPELLING)
