"""The methods that are compared, with the options that their papers ask for."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradwire.bench import methods
from gradwire.compressors.base.registry import make, spec_of
from gradwire.compressors.support.warmup import ratio_at
from gradwire.planner import PlanTable

Row = dict[str, Any]

WARMUP = 0.1  # share of the steps; DGC's is 4 of 90 epochs, each of which has more steps than a whole training here
# {warmup} is DGC's, over a share of the steps. {momentum} is momentum correction, if the optimizer has momentum.
METHODS = {
    "ddp-fp32": "ddp-fp32",
    "ddp-fp16": "ddp-fp16",
    "int8": "int8",  # unbiased: no residual
    "onebit": "onebit{momentum}",  # error feedback, as in 1-bit SGD and HiPress
    "threelc": "threelc{momentum}",  # s = 1, the paper's default, error feedback
    "thc": "thc",  # 4 bits and p = 1/32, as in the paper; granularity chosen for the ranks; error feedback
    "powersgd": "powersgd",  # rank 4, error feedback
    "topk": "topk:ratio=0.01{momentum}",
    "dgc": "dgc:ratio=0.001{warmup}{momentum}",  # its sections 3.2 and 3.3
    "dragonn": "dragonn:ratio=0.001{warmup}{momentum}",  # trained with DGC's corrections in the paper, too
    "auto": "auto",  # fidelity balanced, the default
    "auto/momentum": "auto{momentum}",  # which may then choose threelc
}


def method_of(label: str, steps: int, has_momentum: bool) -> str:
    """The method of one of `METHODS`, or of `gradwire.bench.methods`, for a training.

    Args:
        label: Name in the table, or a method.
        steps: Steps of the training.
        has_momentum: Whether the optimizer has momentum.
    """
    warmup, momentum = f":warmup={round(WARMUP * steps)}", "/momentum" if has_momentum else ""
    return METHODS.get(label, label).format(warmup=warmup, momentum=momentum)


def phases(method: str, steps: int) -> list[tuple[int, str]]:
    """What to time for a training: numbers of steps, and the method without warm-up that stands for them."""
    options = {} if _has_no_options(method) else methods.compressor(method).options
    warmup = options.get("warmup", 0)
    if not warmup:
        return [(steps, method)]
    name, rest = re.split("[:@/]", method)[0], method[len(re.split("[@/]", method)[0]) :]
    ratios = Counter(ratio_at(options["ratio"], warmup, step) for step in range(1, steps + 1))
    return [
        (count, spec_of(make(name, **{**options, "ratio": ratio, "warmup": 0})) + rest)
        for ratio, count in ratios.items()
    ]


def _has_no_options(method: str) -> bool:
    return methods.is_native(method) or methods.is_auto(method) or methods.is_plan(method)


def settled(rows: Sequence[Row], task: str, method: str) -> dict[str, str]:
    """What ``auto`` settled on, by rate: one of DDP's own methods, or a plan as JSON."""
    return {
        row["rate"]: row["plan"]
        for row in rows
        if (row["metric"], row["workload"], row["method"]) == ("settled", task, method)
    }


def trained_as(plan: str) -> str:
    """Name of the training for what ``auto`` settled on. Plans that choose the same have the same name."""
    if methods.is_native(plan):
        return plan
    table = PlanTable.from_json(plan)
    chosen: list[Any] = [(row.name, row.spec, row.strategy, row.partitions, row.batched) for row in table.rows]
    if table.feedback:
        chosen.append(table.feedback)
    return f"{methods.PLAN}:{hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:8]}"
