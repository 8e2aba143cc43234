"""A training result made by hand, for tests of tables, reports and records."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.results import MethodResult, StepTime, TrainingResult
from gradwire.bench.statistics import Split, Spread, ideal_step
from gradwire.planner import PlanTable
from gradwire.planner.table import PlanRow

ENVIRONMENT = {
    "gradwire": "0.1.0",
    "commit": "abc1234",
    "torch": "2.13.0",
    "numba": "0.60",
    "python": "3.11",
    "device": "a processor",
    "cores": "2",
    "date": "2026-01-01 00:00 UTC",
}


def step_time(seconds: float, num_bytes: float, *, measured: bool = True, compute: float = 0.05) -> StepTime:
    """At 100 Mb/s."""
    return StepTime(
        rate="100mbit",
        measured=measured,
        step=Spread(seconds, seconds * 0.9, seconds * 1.1, 5),
        compute=compute,
        bytes=num_bytes,
        dense_bytes=40e6,
        interface_bytes=num_bytes * 1.06 if measured else None,
        interface_payload=num_bytes * 1.01 if measured else None,
        ideal=ideal_step(compute, num_bytes, 100_000_000),
        split=Split.of(seconds, compute, 0.01, 0.005),
        bucket_mb=25.0,
    )


def method(name: str, seconds: float, num_bytes: float, loss: float | None, **options: bool) -> MethodResult:
    losses = [] if loss is None else [4.0, 3.0, loss]
    accuracy = None if loss is None else 0.3
    return MethodResult(name, losses, loss, accuracy, True, [step_time(seconds, num_bytes, **options)])


def result(*results: MethodResult, shaped: bool = True, note: str = "") -> TrainingResult:
    """By default DDP with one method that wins, one that is slower, and one that learns less."""
    return TrainingResult(
        workload="a workload",
        num_parameters=6_000_000,
        ranks=4,
        batch_size=64,
        train_steps=3,
        rates=["100mbit"],
        shaped=shaped,
        replayed=False,
        seconds=12.0,
        environment=ENVIRONMENT,
        note=note,
        results=list(results)
        or [
            method("ddp-fp32", 3.0, 40e6, 2.50),
            method("ddp-fp16", 1.5, 20e6, 2.50),
            method("none", 3.3, 40e6, 2.50),
            method("threelc", 0.2, 1e6, 2.52),
            method("topk:ratio=0.001", 0.1, 0.1e6, 3.00),
        ],
    )


def plan_text(names: Sequence[str], spec: str = "int8") -> str:
    """A plan as JSON, the same for all tensors."""
    rows = [PlanRow(name, 8, "float32", 0.0, spec, "scatter_reduce", 1, False, *[0.001] * 5) for name in names]
    seconds = {"step": 0.1, "dense_step": 0.2, "native_step": 0.2, "ideal_step": 0.1}
    table = PlanTable(tuple(rows), 2, "balanced", native=False, native_kind="fp32", limit="link", **seconds)
    return table.to_json()
