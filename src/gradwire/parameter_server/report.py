"""What a worker of parameter servers has sent, received and lost so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gradwire.parameter_server.slot import ParameterSlot


@dataclass(frozen=True)
class ParameterReport:
    """State of one worker. `str` makes a line of it.

    Attributes:
        steps: Steps of the job.
        sent_bytes: Bytes of frames sent, headers included.
        received_bytes: Bytes of frames received, headers included.
        late_share: Share of this worker's gradients whose step was closed without them, from 0 to 1. Gradients count
            by their elements.
        late: What became of them: ``"keep"``, they were added to later gradients; ``"drop"``, they are lost.
    """

    steps: int
    sent_bytes: int
    received_bytes: int
    late_share: float
    late: str

    @property
    def lost_share(self) -> float:
        """Share of this worker's gradients that are lost because they were late, from 0 to 1."""
        return self.late_share if self.late == "drop" else 0.0

    def __str__(self) -> str:
        fate = "lost" if self.late == "drop" else "added to later ones"
        late = f"{100 * self.late_share:.2f} % of this worker's gradients came late and were {fate}"
        sent = f"{self.sent_bytes:,} bytes sent, {self.received_bytes:,} received"
        return f"{self.steps} steps; {sent}; {late}."


def late_share(slots: Collection[ParameterSlot]) -> float:
    """Share of the elements of all gradients that came late; 0 before the first gradient."""
    late = sum(slot.num_late * slot.config.spec.numel for slot in slots)
    total = sum(slot.num_gradients * slot.config.spec.numel for slot in slots)
    return late / total if total else 0.0
