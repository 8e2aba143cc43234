"""What a handle shows: reports, traces, and scalars for experiment trackers. All of it is local to this rank."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from gradwire.core.errors import OptionError
from gradwire.ddp.status import ModuleStatus
from gradwire.observe.logs import ScalarLog
from gradwire.observe.metrics import Report
from gradwire.observe.status_writer import StatusWriter
from gradwire.observe.trace import Trace, path_of
from gradwire.sync.options import SyncOptions
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.auto import Autopilot
from gradwire.tuning.candidates import GRADWIRE

logger = logging.getLogger("gradwire")
Since = Literal["start", "last"]

SCALARS = {
    "gradwire/step": "Steps, continuing from a loaded state",
    "gradwire/step_ms": "Time of a step",
    "gradwire/wait_ms": "Time in which a step waited after its backward pass for gradwire to average its gradients",
    "gradwire/encode_ms": "Time of encodes and merges in a step, on threads of gradwire",
    "gradwire/decode_ms": "Time of decodes in a step, likewise",
    "gradwire/link_ms": "Time in a step in which frames to a peer were in transit, the mean over peers",
    "gradwire/sent_bytes": "Bytes sent in a step, headers included",
    "gradwire/saved_bytes": "Bytes that an uncompressed ring all-reduce would have sent in a step, less these",
    "gradwire/total_sent_bytes": "Bytes sent since the module was attached",
    "gradwire/total_saved_bytes": "Bytes saved since the module was attached",
    "gradwire/ratio": "Dense bytes divided by sent bytes",
    "gradwire/residual_norm": "2-norm of all residuals of this rank",
    "gradwire/late_elements": "Elements in a step that were sent too late to be counted",
    "gradwire/filled_elements": "Elements in a step whose sum did not come in time, with a mean of zero instead",
    "gradwire/rollbacks": "Steps rolled back since the module was attached, because gradients were not finite",
}
"""Scalars of every job. The times and bytes of a step are means over the steps of the interval."""
AUTO_SCALARS = {
    "gradwire/auto/decisions": "Decisions of `auto` so far",
    "gradwire/auto/settled": "1 if it has decided and watches, 0 if it still measures",
    "gradwire/auto/compresses": "1 if gradwire compresses now, 0 if gradients travel dense or as 16 bits",
    "gradwire/auto/step_ms": "Time of a step by its latest choice, as measured when it chose",
    "gradwire/auto/predicted_ms": "The same, as predicted before; NaN if the choice was not predicted",
    "gradwire/auto/dense_ms": "Time of a step without compression, as measured, or else as predicted",
}
"""Scalars under `auto` only. The times are NaN before the first decision."""


class ObservedHandle:
    """Base of `Handle`: what it shows.

    Attributes:
        synchronizer: Synchronizer of the module's gradients.
        autopilot: Under ``"auto"``, what chooses the plan, with its decisions. Otherwise None.
        status_writer: Writes the file for ``gradwire top``, if there is one.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.synchronizer = synchronizer
        self.autopilot: Autopilot | None = None
        self._marks: dict[object, Report] = {}  # the latest report of everyone who asks for intervals
        self._logs: list[ScalarLog] = []
        self._status: ModuleStatus | None = None
        self.status_writer: StatusWriter | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A gradwire handle has connections and cannot be copied or pickled. Keep it outside of the module that you "
            "copy or save. A copy of an attached DDP module is plain DDP; handle.state_dict() is what to save."
        )

    def report(self, since: Since = "start") -> Report:
        """Bytes, ratios, times and residual norms of this rank, per tensor and in total. Prints as a table.

        Args:
            since: ``"start"``: since the module was attached. ``"last"``: since the last report of that kind.
        """
        return self._interval(_checked(since), "report")[0]

    def scalars(self, since: Since = "start") -> dict[str, float]:
        """Bytes, times and residual norms of this rank as numbers by name, for experiment trackers.

        The names are those of `gradwire.ddp.observed.SCALARS`, which says what they are, and under ``"auto"`` those of
        `AUTO_SCALARS`, too. The norm of the residuals takes one pass over their memory.

        Args:
            since: ``"start"``: since the module was attached. ``"last"``: since the last call of that kind.
        """
        return self._scalars(_checked(since), "scalars")

    def log_to(self, target: Any, every: int = 50, *, all_ranks: bool = False) -> ScalarLog:
        """Write `scalars` to an experiment tracker at regular intervals, and when the module is detached.

        Call it on every rank; rank 0 writes. Nothing is exchanged between ranks. A target that raises ends its log with
        a warning.

        Args:
            target: The path of a CSV file; TensorBoard's SummaryWriter, or anything with its `add_scalar`; a Weights &
                Biases run, or anything with its `log`; or a function that takes the scalars and the step.
            every: Interval in steps. The numbers are those of the interval.
            all_ranks: Whether each rank writes, with its own target. ``{rank}`` in a path stands for the rank; without
                it, the rank is inserted before the suffix.

        Returns:
            The log. Its `close` ends it.

        Raises:
            OptionError: `every` is below 1, or the file has other columns.
            OptionTypeError: Nothing can be written to the target.
        """
        writes = all_ranks or self.synchronizer.rank == 0
        if all_ranks and isinstance(target, str | Path):
            target = path_of(target, self.synchronizer.rank)
        key = object()
        self._interval("last", key)
        scalars, names = partial(self._scalars, "last", key), self._scalar_names
        log = ScalarLog(target if writes else _ignore, every, scalars, names, self.synchronizer.num_steps)
        if writes:
            self._logs.append(log)
        return log

    def trace(self, path: str | Path) -> Trace:
        """Write a Chrome trace of synchronization, for ui.perfetto.dev, with one file per rank.

        ``with handle.trace("trace.json"):`` around some steps writes ``trace.rank0.json``, ``trace.rank1.json`` and so
        on. Without ``with``, call `close` of the returned trace.
        """
        return self.synchronizer.trace(path)

    def start_status(self, method: str, options: SyncOptions) -> None:
        """Start writing the status of this rank for ``gradwire top``, unless its interval is 0.

        Args:
            method: Compressors that were asked for.
            options: Folder and interval.
        """
        if not options.status_interval:
            return
        status = ModuleStatus(self.synchronizer, method, options.status_interval)
        try:
            self.status_writer = status.start(None if options.dump_dir is None else Path(options.dump_dir))
        except OSError as error:
            logger.warning("gradwire top cannot show this rank: %s.", error)
            return
        self._status = status

    def _note_error(self, error: BaseException) -> None:
        """Let ``gradwire top`` show why the module is detached."""
        if self._status is not None:
            self._status.error = f"{type(error).__name__}: {error}"

    def _between_steps(self) -> None:
        """Write what is due. Called before a step begins."""
        if self._status is not None:
            self._status.step(self.autopilot)
        for log in self._logs:
            log.step(self.synchronizer.num_steps)

    def _end_logs(self) -> None:
        """Write what is left, and count the steps that rested, while events can still be emitted."""
        if self._status is not None and self.status_writer is not None:
            self._status.finish(self.autopilot)
            self.status_writer.close("detached")
        for log in self._logs:
            log.close(self.synchronizer.num_steps)
        self._logs.clear()
        if self.autopilot is not None:
            self.autopilot.count_rested()

    def _interval(self, since: Since, key: object) -> tuple[Report, Report]:
        """Return the report of an interval, and that since the start."""
        if self.autopilot is not None:
            self.autopilot.count_rested()
        whole = self.synchronizer.report()
        if since == "start":
            return whole, whole
        before, self._marks[key] = self._marks.get(key), whole
        return (whole if before is None else whole.since(before)), whole

    def _scalars(self, since: Since, key: object) -> dict[str, float]:
        found, whole = self._interval(since, key)
        total, steps = found.total, max(1, found.steps)
        values = (
            self.synchronizer.step, 1e3 * found.seconds / steps, 1e3 * found.wait_seconds / steps,
            1e3 * total.encode_seconds / steps, 1e3 * total.decode_seconds / steps, 1e3 * found.link_seconds / steps,
            total.sent_bytes / steps, (total.dense_bytes - total.sent_bytes) / steps,
            whole.total.sent_bytes, whole.total.dense_bytes - whole.total.sent_bytes,
            total.ratio, total.residual_norm, total.late_elements / steps,
            total.filled_elements / steps, whole.rollbacks,
        )  # fmt: skip
        scalars = dict(zip(SCALARS, map(float, values), strict=True))
        return scalars if self.autopilot is None else scalars | _auto_scalars(self.autopilot)

    @property
    def _scalar_names(self) -> list[str]:
        return [*SCALARS, *(AUTO_SCALARS if self.autopilot is not None else ())]


def _checked(since: Since) -> Since:
    if since not in ("start", "last"):
        raise OptionError(f'since must be "start" or "last", but it is {since!r}.')
    return since


def _auto_scalars(autopilot: Autopilot) -> dict[str, float]:
    step = predicted = dense = math.nan
    if autopilot.decisions:
        latest = autopilot.decisions[-1]
        step = latest.measured[latest.chosen]
        predicted = latest.predicted.get(latest.chosen, math.nan)
        dense = latest.measured.get(latest.baseline, latest.predicted[latest.baseline])
    compresses = autopilot.current.kind == GRADWIRE
    values = len(autopilot.decisions), autopilot.settled, compresses, 1e3 * step, 1e3 * predicted, 1e3 * dense
    return dict(zip(AUTO_SCALARS, map(float, values), strict=True))


def _ignore(scalars: object, step: int) -> None:
    """The log of ranks that do not write."""
