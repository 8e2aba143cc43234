"""What runs wait for: frames of other ranks, replies, and gradients; and what has waited too long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gradwire.core import threads as core_threads
from gradwire.core.errors import SyncError
from gradwire.sync.chunk import Chunk
from gradwire.sync.engine_errors import Waiting, stalled
from gradwire.sync.operations import Op
from gradwire.sync.run import Run

_FRAME_GRACE_SECONDS = 1.0
FUTURE_GRACE_SECONDS = 10.0
"""How much longer a future may take. The code behind it has its own deadline, and knows better which rank is late."""

LOAD, FINISH = -2, -1
"""In place of the index of an operation: the gradients are being copied, and all operations have ended."""

_NOTHING = Chunk(0, 0, 0)
_STANDINS = {LOAD: Op("recv", "load", _NOTHING), FINISH: Op("merge", "finish", _NOTHING)}


def op_of(run: Run, index: int) -> Op:
    """The operation with an index, for messages."""
    return run.operations.ops[index] if index >= 0 else _STANDINS[index]


class Waits:
    """What runs wait for, from oldest to newest of each kind. The engine's lock guards it.

    Args:
        stall_seconds: Longest time that a live peer may take to send a frame that is waited for.

    Attributes:
        receiving: Runs that have frames to receive, by round.
        awaited: Futures that are not done and sends that lend memory, by run and operation: when the wait began, in
            seconds of the monotonic clock.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.receiving: dict[int, Run] = {}
        self.awaited: dict[tuple[Run, int], float] = {}
        self._stall_seconds = stall_seconds
        self._check_at = 0.0  # when to look for stalls next

    def __iter__(self) -> Iterator[Waiting]:
        for run in self.receiving.values():
            for index in run.operations.recvs.values():
                if run.pending[index]:
                    yield Waiting(run, run.operations.ops[index], run.started)
        for (run, index), started in self.awaited.items():
            yield Waiting(run, op_of(run, index), started)

    def need(self, peer: int, is_anyone_lost: bool) -> bool:
        """Whether a run waits for a peer.

        Args:
            peer: The peer, which has left.
            is_anyone_lost: Whether a peer has left without a closing message. A future may depend on every rank, but
                the code behind it learns of closing messages itself.
        """
        ops = [op_of(run, index) for run, index in self.awaited if index != LOAD]
        awaited = any(op.peer == peer or (op.peer is None and is_anyone_lost) for op in ops)
        return awaited or any(lacks(run, peer) for run in self.receiving.values())

    def seconds_to_check(self) -> float:
        """Seconds until `stalled` looks again."""
        if not self.receiving and not self.awaited:
            return core_threads.WAKE_SECONDS
        return max(0.0, self._check_at - time.monotonic())

    def stalled(self) -> SyncError | None:
        """The error of a frame or a future that is late. Nearly every frame asks, so it looks once per interval."""
        now = time.monotonic()
        if now < self._check_at:
            return None
        self._check_at = now + min(1.0, self._stall_seconds / 4)
        waiting = list(self)
        frames, futures = ([each for each in waiting if (each.op.peer is None) == is_future] for is_future in (0, 1))
        late = []
        if futures:
            late.append((min(futures, key=lambda each: each.started), FUTURE_GRACE_SECONDS))
        if frames:
            # A frame of stage 0 depends on its sender alone, so a missing one proves that the sender is late. A rank
            # that lacks only later stages gives ranks that know more some time to report who is late.
            oldest = min(frames, key=lambda each: (each.op.stage, each.started))
            late.append((oldest, _FRAME_GRACE_SECONDS if oldest.op.stage else 0.0))
        for one, grace in late:
            if now - one.started > self._stall_seconds + grace:
                return stalled(one, now - one.started, self._stall_seconds)
        return None

    def described(self) -> list[dict[str, Any]]:
        """All waits, the oldest first, for the flight recorder."""
        now = time.monotonic()
        return [
            {"tensor": run.name, "phase": op.phase, "rank": op.peer, "round": run.round, "seconds": now - started}
            for run, op, started in sorted(self, key=lambda each: each.started)
        ]

    def clear(self) -> None:
        """Wait for nothing any more."""
        self.receiving.clear()
        self.awaited.clear()


def lacks(run: Run, peer: int) -> bool:
    """Whether a run waits for a frame of `peer`."""
    return any(key.peer == peer and run.pending[index] for key, index in run.operations.recvs.items())
