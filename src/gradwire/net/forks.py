"""Descriptors stay with the process that opened them: a forked child closes its copies when it begins.

Training processes fork, for a data loader's workers above all. A child's copy keeps a connection open when the process
that it belongs to dies, so that the peers learn of that death only by its silence.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod

from gradwire.core.errors import SyncError

_bound: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


class ProcessBound(ABC):
    """Base of what holds descriptors that belong to one process. A subclass calls `_bind` once it has them."""

    _pid: int

    def _bind(self) -> None:
        """Belong to the process that calls this."""
        self._pid = os.getpid()
        _bound.add(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, whose descriptors are closed."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse to work in a forked child.

        Raises:
            SyncError: this is a forked child's copy.
        """
        if self.forked:
            raise SyncError(
                f"This connection belongs to process {self._pid}, and process {os.getpid()} is a fork of it. Connect "
                "after forking, or start workers with the 'spawn' method."
            )

    @abstractmethod
    def _release(self) -> None:
        """Close every descriptor. In a forked child no lock is held, and none can be had: its holder may be missing."""


def _release_in_child() -> None:
    for owner in list(_bound):
        owner._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
