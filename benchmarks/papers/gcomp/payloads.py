"""Bytes of a rank's own payload: `gcomp` with derived and with sent levels, and `lossless`, on the text workload.

One of four ranks trains. At a step of each optimizer, the gradients of its matrices are encoded as that rank would send
them: for a ring, whose encodes share the error equally, and for scatter-reduce, where that of the mean has half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from gradwire.bench.workloads import make_workload
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState

KEY, CHOICES = ("optimizer", "method"), ()
RANKS, COSINE_STEPS = 4, 40
Row = dict[str, Any]
Maker = Callable[[nn.Module], torch.optim.Optimizer]
# By optimizer: how it is made, and the step whose gradient is encoded.
JOBS: dict[str, tuple[Maker, int]] = {
    "SGD": (lambda model: make_workload("text").optimizer(model), 8),
    "SGD, momentum": (lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), 12),
    "AdamW": (lambda model: torch.optim.AdamW(model.parameters(), 1e-3), 12),
    "AdamW, cosine": (lambda model: torch.optim.AdamW(model.parameters(), 1e-3), COSINE_STEPS),
}
# By method: compressor, and the share of the error that one encode may make; None for an equal share.
METHODS: dict[str, tuple[str, float | None]] = {
    "lossless": ("lossless", None),
    "levels sent": ("gcomp:levels=sent", None),
    "levels derived, ring": ("gcomp", None),
    "levels derived, scatter-reduce": ("gcomp", 1 / (2 * (RANKS - 1))),
}


def run() -> Iterator[list[Row]]:
    """All figures."""
    for optimizer, (maker, last) in JOBS.items():
        yield [
            {
                "optimizer": optimizer, "step": last, "method": method, "metric": "ratio", "value": ratio,
                "unit": "fraction", "dtype": "float32", "size": size, "ranks": RANKS, "source": "measured",
            }
            for method, ratio, size in ratios(optimizer, maker, last)
        ]  # fmt: skip


def ratios(name: str, maker: Maker, last: int) -> Iterator[tuple[str, float, int]]:
    """Method, packed over plain bytes, and number of elements, after `last` steps."""
    torch.manual_seed(0)
    workload = make_workload("text")
    model = workload.model()
    optimizer = maker(model)
    schedule = CosineAnnealingLR(optimizer, COSINE_STEPS, eta_min=2e-5) if "cosine" in name else None
    matrices = [(each, parameter) for each, parameter in model.named_parameters() if parameter.dim() > 1]
    state = OptimizerState(optimizer, matrices)
    for step in range(last + 1):
        batch = workload.batch(0, step, 0, RANKS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        if step < last:
            state.before_step([])
            optimizer.step()
            if schedule is not None:
                schedule.step()
    for method, (spec, share) in METHODS.items():
        codec, packed, plain = make(spec), 0, 0
        for each, parameter in matrices:
            grad = parameter.grad
            assert grad is not None
            aux = {**state.slices(each, ElementRange(0, parameter.numel())), "common": torch.tensor(True)}
            ctx = Context(each, world_size=RANKS, spec=TensorSpec.of(grad), aux=aux, error_share=share)
            packed += codec.encode(grad, ctx, scale=1 / RANKS).body.nbytes
            plain += grad.nbytes
        yield method, packed / plain, plain // 4


def table(rows: Sequence[Row]) -> str:
    """Markdown table: bytes over those of float32."""
    found = {(row["optimizer"], row["method"]): row for row in rows}
    lines = [f"| | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    for optimizer, (_, last) in JOBS.items():
        cells = " | ".join(f"{found[optimizer, method]['value']:.3f}" for method in METHODS)
        lines.append(f"| {optimizer}, step {last} | {cells} |")
    return "\n".join(lines)
