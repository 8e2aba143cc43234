"""Updates of a server's parameters, each encoded once for all workers that are at its version, whenever they pull it.

All workers with version v of a parameter have the same bits, and update v takes them to version v + 1. It is therefore
the same for all of them: those that wait for it, those that compute with older values because of a staleness, and those
that come back after their connection was lost. While workers have different versions, there are several updates in
flight, each shared by the workers at its version.

Guarantees: the updates that are kept of a parameter have no more bytes than its values. A worker that has missed more
gets the values, which are then fewer bytes.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3: a change is compressed once for all pulls, or with loosely
synchronized workers once for each subset with the same local model. Differences: a worker that is several versions
behind gets the updates one after another, and not their sum. A sum would have an error of its own, and with it workers
of the same version would have different bits; the server would keep a copy of the parameters for each subset.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from gradwire.wire.frame import Header

Update = tuple[Header, np.ndarray]
"""Header and body of an update."""


class SharedUpdates:
    """The newest updates of each parameter. They are not part of a server's state on disk."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Update]] = {}
        self._num_bytes: dict[int, int] = {}

    def add(self, update: Update, max_bytes: int) -> None:
        """Keep a parameter's newest update, and no more of the older ones than `max_bytes` have room for."""
        header, body = update
        kept = self._kept.setdefault(header.tensor, deque())
        assert not kept or kept[-1][0].round + 1 == header.round, "no update is left out"
        kept.append(update)
        num_bytes = self._num_bytes.get(header.tensor, 0) + body.nbytes
        while num_bytes > max_bytes:
            num_bytes -= kept.popleft()[1].nbytes
        self._num_bytes[header.tensor] = num_bytes

    def since(self, tensor: int, version: int) -> list[Update]:
        """The updates that lead from a version of a parameter to the newest one; empty if one of them is not kept."""
        kept = self._kept.get(tensor, deque())
        if not kept or kept[0][0].round > version:
            return []
        return [update for update in kept if update[0].round >= version]

    def num_bytes(self, tensor: int) -> int:
        """Bytes of the updates that are kept of a parameter."""
        return self._num_bytes.get(tensor, 0)
