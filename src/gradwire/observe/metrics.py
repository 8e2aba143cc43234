"""Metrics: what synchronisation cost, per tensor and in all, gathered from the event stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.core.events import Event, EventStream


@dataclass
class TensorMetrics:
    """Sums over all steps so far, for one tensor (or one batch of small ones), on this rank.

    Attributes:
        method: compressor and strategy.
        elements: elements of the tensor.
        syncs: synchronisations that ended.
        sent_bytes: frames handed to the transport, headers included.
        dense_bytes: what a ring all-reduce of the uncompressed tensor would have sent: 2 (W − 1)/W of its bytes.
        encode_seconds: encodes and merges.
        decode_seconds: decodes.
        latency_seconds: from submission to result.
        residual_norm: 2-norm of what this rank holds back, both roles; filled in by the report.
        late_elements: elements that this rank sent too late to be counted, and kept.
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

    @property
    def ratio(self) -> float:
        """Dense bytes over sent bytes."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass
class Report:
    """What `handle.report()` returns: prints as a table, `as_dict` for machines."""

    rank: int
    world_size: int
    steps: int
    tensors: dict[str, TensorMetrics]
    total: TensorMetrics = field(default_factory=TensorMetrics)

    def as_dict(self) -> dict[str, Any]:
        rows = {name: asdict(row) | {"ratio": row.ratio} for name, row in self.tensors.items()}
        total = asdict(self.total) | {"ratio": self.total.ratio}
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "steps": self.steps,
            "tensors": rows,
            "total": total,
        }

    def __str__(self) -> str:
        head = (
            "tensor",
            "method",
            "elements",
            "kB/step",
            "ratio",
            "encode ms",
            "decode ms",
            "latency ms",
            "residual",
        )
        rows = [
            head,
            *(self._row(name, row) for name, row in self.tensors.items()),
            self._row("total", self.total),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths))
            )
            for row in rows
        ]
        title = f"gradwire on rank {self.rank} of {self.world_size}, {self.steps} steps (figures a step)"
        return "\n".join([title, *lines])

    def _row(self, name: str, row: TensorMetrics) -> tuple[str, ...]:
        syncs = max(row.syncs, 1)
        return (
            name,
            row.method,
            f"{row.elements:,}",
            f"{row.sent_bytes / syncs / 1e3:,.1f}",
            f"{row.ratio:.1f}",
            f"{row.encode_seconds / syncs * 1e3:.2f}",
            f"{row.decode_seconds / syncs * 1e3:.2f}",
            f"{row.latency_seconds / syncs * 1e3:.2f}",
            f"{row.residual_norm:.3g}",
        )


class Metrics:
    """Listens to an event stream and adds up, tensor by tensor."""

    def __init__(self, events: EventStream) -> None:
        self._tensors: dict[str, TensorMetrics] = {}
        self._lock = threading.Lock()
        self.close = events.listen(self._on_event)

    def report(self, rank: int, world_size: int, steps: int, residual_norms: Mapping[str, float]) -> Report:
        """Everything so far."""
        with self._lock:
            rows = {name: TensorMetrics(**asdict(row)) for name, row in self._tensors.items()}
        for name, row in rows.items():
            row.residual_norm = residual_norms.get(name, 0.0)
        total = TensorMetrics(syncs=steps)
        for row in rows.values():
            total.elements += row.elements
            total.sent_bytes += row.sent_bytes
            total.dense_bytes += row.dense_bytes
            total.encode_seconds += row.encode_seconds
            total.decode_seconds += row.decode_seconds
            total.late_elements += row.late_elements
            total.latency_seconds = max(total.latency_seconds, row.latency_seconds)
        total.residual_norm = sum(row.residual_norm**2 for row in rows.values()) ** 0.5
        return Report(rank, world_size, steps, rows, total)

    def _on_event(self, event: Event) -> None:
        if not event.tensor:
            return
        with self._lock:
            if event.kind == "submit":
                row = self._tensors.setdefault(event.tensor, TensorMetrics())
                row.method, row.elements = event.detail["method"], event.detail["elements"]
                row.dense_bytes += event.nbytes
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
            elif event.kind == "done":
                known.syncs += 1
                known.latency_seconds += event.duration
