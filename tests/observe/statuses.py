"""Statuses for tests."""

from __future__ import annotations

from typing import Any

from gradwire.observe.processes import ProcessIdentity
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

ELSEWHERE = ProcessIdentity("another machine", 1234, 99)


def status(rank: int = 0, **fields: Any) -> RankStatus:
    """A rank of two that trains by auto, with every field set."""
    candidates = (CandidateStatus("DDP's all-reduce", 0.2, 0.25), CandidateStatus("gradwire, threelc", 0.05))
    decision = DecisionStatus(20, "at the start", "gradwire, threelc", candidates, 1e8, 0.002)
    known: dict[str, Any] = {
        "job": "00c0ffee00c0ffee", "rank": rank, "world_size": 2, "process": ELSEWHERE, "host": "node7",
        "script": "train.py", "method": "auto", "started": 1e9, "written": 1e9 + 60, "interval": 2.0, "step": 1234,
        "num_steps": 234, "step_age": 0.1, "latest": StepStatus(40, 0.05, 0.01, 0.004, 0.003, 0.02, 1e5, 4e6),
        "history": (0.2, 0.05, 0.06), "seconds": 58.0, "sent_bytes": 10**7, "dense_bytes": 4 * 10**8, "rollbacks": 3,
        "residual_norm": 1.5, "residual_step": 1200, "links": (LinkStatus(1 - rank, 10**7, 10**7, 0.4, 0.2),),
        "tensors": (TensorStatus("fc.weight", "threelc ring", 10**6, 9e4, 41.5, 1.5),),
        "auto": AutoStatus("balanced", "gradwire, threelc", True, 1, (decision,)),
    }  # fmt: skip
    return RankStatus(**(known | fields))


def blocked(rank: int, peer: int, seconds: float) -> RankStatus:
    """A rank that waits for another."""
    return status(rank, step_age=seconds, waiting=WaitStatus(seconds, "fc.weight", "recv scatter", peer))
