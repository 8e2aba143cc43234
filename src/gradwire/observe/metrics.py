"""Metrics: the cost of synchronization, per tensor and in total, collected from the event stream."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gradwire.core.events import Event, EventStream


@dataclass
class TensorMetrics:
    """Sums over all steps so far on this rank, for one tensor, fusion group or bucket.

    The total of a report adds up all rows. Only latencies overlap: the total's latency is that of the slowest row.

    Attributes:
        method: Compressor and strategy.
        elements: Number of elements; 0 when its tensors have moved to other rows, after DDP has rebuilt its buckets.
        syncs: Number of completed synchronizations.
        sent_bytes: Bytes handed to the transport, headers included.
        dense_bytes: Bytes that a ring all-reduce of the uncompressed tensor would have sent: 2 (W − 1)/W of its size.
        encode_seconds: Time of encodes and merges.
        decode_seconds: Time of decodes.
        latency_seconds: Time from submission to result.
        residual_norm: 2-norm of this rank's residuals of both roles, at the time of the report.
        late_elements: Elements that this rank sent too late to be counted. It keeps them in its residual, or drops
            them if told to.
        filled_elements: Elements for which this rank took a mean of zero, because their sum did not come in time.
    """

    method: str = ""
    elements: int = 0
    syncs: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    latency_seconds: float = 0.0
    residual_norm: float = 0.0
    late_elements: int = 0
    filled_elements: int = 0

    @property
    def ratio(self) -> float:
        """Dense bytes divided by sent bytes."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass
class Report:
    """The result of `handle.report()`. It prints as a table; `as_dict` is for programs.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        steps: Number of steps since the module was attached, or of the interval.
        tensors: Metrics by tensor, fusion group or bucket.
        total: Metrics of all rows together.
        notes: Things that the user may not expect, as sentences that say what to do.
        seconds: Time since the first of these steps began.
        wait_seconds: Time in which a backward pass had ended and waited for gradwire to average its gradients.
        link_seconds: Time in which frames to a peer were in transit, the mean over peers.
        rollbacks: Number of steps that left no trace in the residuals, because they were not finite.
    """

    rank: int
    world_size: int
    steps: int
    tensors: dict[str, TensorMetrics]
    total: TensorMetrics = field(default_factory=TensorMetrics)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    wait_seconds: float = 0.0
    link_seconds: float = 0.0
    rollbacks: int = 0

    def since(self, earlier: Report) -> Report:
        """Return a report of the time from `earlier` to this report. Residual norms are those of its end."""
        rows = {name: _difference(row, earlier.tensors.get(name)) for name, row in self.tensors.items()}
        rows = {name: row for name, row in rows.items() if row.syncs or row.sent_bytes or row.residual_norm}
        sums = {name: getattr(self, name) - getattr(earlier, name) for name in _SUMS}
        return replace(self, tensors=rows, total=_total(rows.values()), **sums)

    def as_dict(self) -> dict[str, Any]:
        rows = {name: asdict(row) | {"ratio": row.ratio} for name, row in self.tensors.items()}
        return asdict(self) | {"tensors": rows, "total": asdict(self.total) | {"ratio": self.total.ratio}}

    def __str__(self) -> str:
        head = ("tensor", "method", "elements", "kB/step", "ratio", "encode ms", "decode ms", "latency ms", "residual")
        tensors = (self._row(name, row) for name, row in self.tensors.items())
        rows = [head, *tensors, self._row("total", self.total)]
        aligns: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * (len(head) - 2)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(align(cell, width) for align, cell, width in zip(aligns, row, widths)) for row in rows]
        title = f"gradwire on rank {self.rank} of {self.world_size}, {self.steps} steps (figures per step)"
        return "\n".join([title, *lines, *self.notes])

    def _row(self, name: str, row: TensorMetrics) -> tuple[str, ...]:
        # One divisor for all rows. Otherwise, rows that were not part of every step would not add up to the total.
        steps = self.steps or max((each.syncs for each in self.tensors.values()), default=0) or 1
        return (
            name,
            row.method,
            f"{row.elements:,}",
            f"{row.sent_bytes / steps / 1e3:,.1f}",
            f"{row.ratio:.1f}",
            f"{row.encode_seconds / steps * 1e3:.2f}",
            f"{row.decode_seconds / steps * 1e3:.2f}",
            f"{row.latency_seconds / steps * 1e3:.2f}",
            f"{row.residual_norm:.3g}",
        )


class Metrics:
    """Listens to an event stream and sums its events by tensor."""

    def __init__(self, events: EventStream) -> None:
        self._tensors: dict[str, TensorMetrics] = {}
        self._row_of: dict[str, str] = {}  # by parameter name: the last row that it was part of
        self._wait_seconds = 0.0
        self._rollbacks = 0
        self._rolled_back = -1  # the last of these steps; each optimizer's tensors have an event of their own
        self._lock = threading.Lock()
        self.close = events.listen(self._on_event)

    def report(self, rank: int, world_size: int, steps: int, residual_norms: Mapping[str, float]) -> Report:
        """Return a report of all events so far."""
        with self._lock:
            rows = {name: copy(row) for name, row in self._tensors.items()}
            row_of = dict(self._row_of)
            wait_seconds, rollbacks = self._wait_seconds, self._rollbacks
        for name in rows.keys() - row_of.values():
            rows[name].elements = 0
        for name, norm in residual_norms.items():
            row = rows.setdefault(row_of.get(name, name), TensorMetrics())
            row.residual_norm = math.hypot(row.residual_norm, norm)
        total = _total(rows.values())
        return Report(rank, world_size, steps, rows, total, wait_seconds=wait_seconds, rollbacks=rollbacks)

    def _on_event(self, event: Event) -> None:
        if not event.tensor:
            with self._lock:
                self._wait_seconds += event.duration if event.kind == "wait" else 0.0
                if event.kind == "rollback" and not event.detail["finite"]:
                    self._rollbacks += event.detail["num_steps"] != self._rolled_back
                    self._rolled_back = event.detail["num_steps"]
            return
        with self._lock:
            if event.kind == "submit":
                row = self._tensors.setdefault(event.tensor, TensorMetrics())
                row.method, row.elements = event.detail["method"], event.detail["elements"]
                row.dense_bytes += event.nbytes
                row.sent_bytes += event.detail.get("sent_bytes", 0)  # not by our transport, which emits its own events
                self._row_of.update(dict.fromkeys(event.detail.get("members") or (event.tensor,), event.tensor))
                return
            known = self._tensors.get(event.tensor)
            if known is None:
                return
            if event.kind == "send":
                known.sent_bytes += event.nbytes
            elif event.kind in ("encode", "merge"):
                known.encode_seconds += event.duration
            elif event.kind == "decode":
                known.decode_seconds += event.duration
            elif event.kind == "late":
                known.late_elements += event.detail["elements"]
            elif event.kind == "filled":
                known.filled_elements += event.detail["elements"]
            elif event.kind == "done":
                known.syncs += event.detail.get("syncs", 1)
                known.latency_seconds += event.duration


_SUMS = ("steps", "seconds", "wait_seconds", "link_seconds", "rollbacks")


def _difference(later: TensorMetrics, earlier: TensorMetrics | None) -> TensorMetrics:
    if earlier is None:
        return later
    same = ("method", "elements", "residual_norm")
    names = [each.name for each in fields(TensorMetrics) if each.name not in same]
    return replace(later, **{name: getattr(later, name) - getattr(earlier, name) for name in names})


def _total(rows: Iterable[TensorMetrics]) -> TensorMetrics:
    total = TensorMetrics()
    for row in rows:
        for field_ in fields(TensorMetrics):
            if field_.name not in ("method", "latency_seconds", "residual_norm"):
                setattr(total, field_.name, getattr(total, field_.name) + getattr(row, field_.name))
        total.latency_seconds = max(total.latency_seconds, row.latency_seconds)
        total.residual_norm = math.hypot(total.residual_norm, row.residual_norm)
    return total
