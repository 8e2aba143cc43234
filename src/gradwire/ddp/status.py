"""The status of an attached module, for `gradwire top`.

What belongs to steps is taken by the training thread, where one step has ended and the next begins. It takes at most
`COST_SHARE` of the time: the longer it takes, the less often it is done. The rest (links, what is waited for, ages) is
added by the thread that writes.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from gradwire.net.transport import PeerState
from gradwire.observe import status_files
from gradwire.observe.metrics import Report
from gradwire.observe.processes import ProcessIdentity
from gradwire.observe.recorder import default_directory
from gradwire.observe.status import (
    AutoStatus,
    CandidateStatus,
    DecisionStatus,
    LinkStatus,
    RankStatus,
    StepStatus,
    TensorStatus,
    WaitStatus,
)
from gradwire.observe.status_writer import StatusWriter
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.auto import Autopilot
from gradwire.tuning.choice import Decision

COST_SHARE = 1e-3
"""Largest share of the training thread's time, for figures, and as much for the norms of residuals."""
HISTORY = 60
"""Number of intervals whose step times are kept."""
MAX_TENSORS = 16
MAX_LINKS = 128
MAX_DECISIONS = 4
_HELD_UP_SECONDS = 1.0  # age of a step from which it is worth to ask the engine what it waits for


class ModuleStatus:
    """Collects the status of one attached module.

    Args:
        synchronizer: Synchronizer of its gradients.
        method: Compressors that were asked for.
        interval: Time between two statuses.

    Attributes:
        error: What has ended training, if somebody knows; empty otherwise.
    """

    def __init__(self, synchronizer: Synchronizer, method: str, interval: timedelta) -> None:
        self.error = ""
        self._synchronizer = synchronizer
        self._seconds = interval.total_seconds()
        self._due = self._norms_due = 0.0
        self._step_began: float | None = None
        self._before: Report | None = None
        self._norms: dict[str, float] = {}
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._links: tuple[float, dict[int, PeerState]] = (time.monotonic(), {})
        epoch = synchronizer.epoch
        self._status = RankStatus(
            job=f"{secrets.randbits(64) if epoch is None else epoch:016x}", rank=synchronizer.rank,
            world_size=synchronizer.world_size, process=ProcessIdentity.current(), host=socket.gethostname(),
            script=Path(sys.argv[0]).name or "python", method=method, started=time.time(), interval=self._seconds,
        )  # fmt: skip

    def start(self, folder: Path | None) -> StatusWriter:
        """Start writing it to a folder; None is that of the flight recorder.

        Raises:
            OSError: That folder is not private.
        """
        folder = default_directory() if folder is None else folder
        path = status_files.path_of(folder, self._status.job, self._status.rank)
        return StatusWriter(path, self.collect, timedelta(seconds=self._seconds))

    def step(self, autopilot: Autopilot | None) -> None:
        """Take what belongs to steps, if it is time. Called by the training thread, before a step begins."""
        self._step_began = now = time.monotonic()
        if now < self._due:
            return
        if now >= self._norms_due:
            self._take_norms()
            self._norms_due = self._next(now)
        began = time.monotonic()
        self._take(autopilot)
        self._due = self._next(began)

    def finish(self, autopilot: Autopilot | None) -> None:
        """Take what belongs to steps a last time. Called by the training thread."""
        self._take(autopilot)

    def collect(self, end: str) -> RankStatus:
        """Return the status. Called by the thread that writes.

        Args:
            end: How the rank has ended; empty if it has not.
        """
        now, began, failure = time.monotonic(), self._step_began, self._synchronizer.failure
        if self._synchronizer.closed:
            end = end or "detached"  # a module that was dropped without `detach`
        age = None if began is None else now - began
        waiting = None
        if age is not None and age > _HELD_UP_SECONDS and not end and failure is None:
            waiting = self._longest_wait(now)
        error = self.error if failure is None else str(failure)
        if end == "exited" and not error and (cause := getattr(sys, "last_value", None)) is not None:
            error = f"{type(cause).__name__}: {cause}"
        return replace(
            self._status, written=time.time(), step=self._synchronizer.step, num_steps=self._synchronizer.num_steps,
            step_age=age, links=self._taken_links(now), waiting=waiting, error=error, end=end,
        )  # fmt: skip

    def _next(self, began: float) -> float:
        """When to do again what began then and has ended now."""
        return began + max(self._seconds, (time.monotonic() - began) / COST_SHARE)

    def _take_norms(self) -> None:
        report = self._synchronizer.report()
        self._norms = {name: row.residual_norm for name, row in report.tensors.items()}
        self._status = replace(
            self._status, residual_norm=report.total.residual_norm, residual_step=self._synchronizer.step
        )

    def _take(self, autopilot: Autopilot | None) -> None:
        if autopilot is not None:
            autopilot.count_rested()
        whole = self._synchronizer.report(with_norms=False)
        before, self._before = self._before, whole
        auto = None if autopilot is None else _auto_status(autopilot)
        self._status = replace(
            self._status, seconds=whole.seconds, sent_bytes=whole.total.sent_bytes,
            dense_bytes=whole.total.dense_bytes, rollbacks=whole.rollbacks, notes=tuple(whole.notes), auto=auto,
        )  # fmt: skip
        latest = whole if before is None else whole.since(before)
        if latest.steps:
            self._history.append(latest.seconds / latest.steps)
            step, tensors = _step_status(latest), self._tensors(latest)
            self._status = replace(self._status, latest=step, tensors=tensors, history=tuple(self._history))

    def _tensors(self, report: Report) -> tuple[TensorStatus, ...]:
        shown = [(name, row) for name, row in report.tensors.items() if row.elements]  # control messages have none
        rows = sorted(shown, key=lambda item: -item[1].sent_bytes)[:MAX_TENSORS]
        return tuple(
            TensorStatus(
                name, row.method, row.elements, row.sent_bytes / report.steps, row.ratio, self._norms.get(name)
            )
            for name, row in rows
        )

    def _taken_links(self, now: float) -> tuple[LinkStatus, ...]:
        then, before = self._links
        states = self._synchronizer.peer_states()
        self._links = now, {each.peer: each for each in states}
        links = []
        for each in states[:MAX_LINKS]:
            busy = each.busy_seconds - before.get(each.peer, each).busy_seconds
            share = min(1.0, busy / (now - then)) if now > then else 0.0
            links.append(
                LinkStatus(each.peer, each.sent_bytes, each.received_bytes, share, each.silent_seconds, each.gone)
            )
        return tuple(links)

    def _longest_wait(self, now: float) -> WaitStatus | None:
        found = self._synchronizer.longest_wait()
        if found is None:
            return None
        return WaitStatus(now - found.started, found.run.name, found.op.phase, found.op.peer)


def _step_status(report: Report) -> StepStatus:
    total, steps = report.total, report.steps
    return StepStatus(
        steps, report.seconds / steps, report.wait_seconds / steps, total.encode_seconds / steps,
        total.decode_seconds / steps, report.link_seconds / steps, total.sent_bytes / steps, total.dense_bytes / steps,
    )  # fmt: skip


def _auto_status(autopilot: Autopilot) -> AutoStatus:
    decisions = tuple(map(_decision_status, autopilot.decisions[-MAX_DECISIONS:]))
    return AutoStatus(
        autopilot.fidelity, autopilot.current.name, autopilot.settled, len(autopilot.decisions), decisions
    )


def _decision_status(decision: Decision) -> DecisionStatus:
    link = decision.costs.slowest
    candidates = dict.fromkeys([*decision.measured, *decision.predicted])
    return DecisionStatus(
        decision.step, decision.reason, decision.chosen.name,
        tuple(CandidateStatus(x.name, decision.measured.get(x), decision.predicted.get(x)) for x in candidates),
        8 / link.seconds_per_byte if link.seconds_per_byte else 0.0, link.latency,
    )  # fmt: skip
