"""Forked children close their copies of connections at once, and wait for no thread that they do not have.

Training processes fork, mostly for a data loader's workers. A child's copy of a socket would keep the connection open
when the parent dies, and the peers would learn of that only by its silence. A lock that another thread holds during the
fork is never released in the child.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod

from gradwire.core.errors import SyncError

_bound: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


class ProcessBound(ABC):
    """Base of objects with file descriptors or threads of one process. A subclass calls `_bind` once it has them."""

    _pid: int

    def _bind(self) -> None:
        """Bind this object to the calling process."""
        self._pid = os.getpid()
        _bound.add(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Check that this is not a forked child.

        Raises:
            SyncError: This is a forked child's copy.
        """
        if self.forked:
            raise SyncError(
                f"This connection belongs to process {self._pid}, and process {os.getpid()} is a fork of that process. "
                "Connect after forking, or start workers with the 'spawn' method."
            )

    @abstractmethod
    def _release(self) -> None:
        """Close every descriptor, in a forked child. Takes no lock, whose holder may not exist there."""


def _release_in_child() -> None:
    for owner in list(_bound):
        owner._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
