"""GCOMP's metric with moments: the study that section 8 of its paper leaves to future work.

`gcomp` cuts bits that an update of the parameter does not notice. But a gradient first enters moments, and the same can
be asked of each: how many times the gradient's share in the new value is the old value's.

    of the parameter:       δ_θ, that of `gradwire.compressors.support.gcomp_metric`
    of the momentum:        δ_m = β₁ |m| / ((1 − β₁) |g|), where m' = β₁ m + (1 − β₁) g
    of the second moment:   δ_v = β₂ v / (2 (1 − β₂) g²), where v' = β₂ v + (1 − β₂) g², whose slope is 2 (1 − β₂) |g|

These yield three metrics, each with the guard for all ranks:

- *any*: the larger of δ_θ and δ_m. Bits lost in the rounding of the momentum cannot reach the parameter. Cuts more.
- *momentum*: the smaller of δ_m and δ_v. No moment changes by its last bit.
- *all*: the smallest of the three. No value written by the step changes by its last bit, so no error is kept.
- *nothing*: 0, like `lossless`.

Levels are sent.

Four ranks in one process train the models of `benchmarks.papers.gcomp.models` as `benchmarks.papers.gcomp.loss` does.
Compared with exact sums are bytes; relative distances of parameters and momentum after some numbers of steps (the
second step is the first with moments, and thus the first that is cut); and losses. Another order of ranks changes only
roundings.

Differences: δ_v uses the value to send instead of the mean, which is not known before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.options import Cifar10, Sst2
from benchmarks.papers.gcomp.loss import BATCH, RANKS, Job
from benchmarks.papers.gcomp.models import Training, trainings
from gradwire.compressors.support.gcomp_metric import Numbers
from gradwire.kernels import active as kernels

CHOSEN = ("SGD, momentum", "AdamW")
METRICS = ("parameter", "any", "momentum", "all", "nothing")
METHODS = ("another order", *METRICS)
LOOKED_AT = (2, 10, 50, 200)
AS_GIVEN = torch.tensor(Numbers(direct=1.0))
"""Numbers with which the codec uses the values given as parameters as the limits themselves."""


def limits_of(metric: str, grad: np.ndarray, aux: Mapping[str, torch.Tensor], group: Mapping[str, Any]) -> np.ndarray:
    """Size of an element below which a cut of all its bits is not noticed: δ · |grad|, float32[N].

    Args:
        metric: One of `METRICS`.
        grad: Values to send, float32[N].
        aux: Optimizer state for `gcomp`, with moments.
        group: Group of the parameter.
    """
    m, v = (aux[name].numpy() if name in aux else None for name in ("first", "second"))
    assert m is not None
    theta = np.empty(grad.size, np.float32)
    kernels.update_limits(aux["parameter"].numpy(), m, v, aux["numbers"].numpy(), theta)
    beta1, beta2 = group["betas"] if "betas" in group else (group["momentum"], 0.0)
    taken = 1 - (beta1 if "betas" in group else group["dampening"])
    momentum = np.abs(m) * np.float32(beta1 / taken)
    with np.errstate(divide="ignore", invalid="ignore"):
        squared = np.full_like(m, np.inf) if v is None else v * np.float32(beta2 / (2 * (1 - beta2))) / np.abs(grad)
    moments = np.fmin(momentum, squared)
    return {
        "parameter": theta,
        "any": np.fmax(theta, momentum),
        "momentum": moments,
        "all": np.fmin(theta, moments),
        "nothing": np.zeros_like(theta),
    }[metric]


class Measured(Job):
    """A training with exact sums in a given order of ranks, or with gradients cut by one of the metrics."""

    def __init__(self, training: Training, optimizer: str, method: str, seed: int = 0) -> None:
        super().__init__(training, optimizer, "gcomp" if method in METRICS else method, seed)
        self.metric = method

    def aux(self, name: str, grad: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        found = super().aux(name, grad, scale)
        found.pop("common")
        if "first" not in found:
            return found
        scaled = (grad.reshape(-1) * scale).numpy()
        limits = limits_of(self.metric, scaled, found, self.optimizers[0].param_groups[0])
        kept = {key: found[key] for key in ("loss_scale", "clipped")}
        return {**kept, "parameter": torch.from_numpy(limits), "numbers": AS_GIVEN}

    def error_share(self, scale: float) -> float | None:
        """An equal share for each encode."""
        return None

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters, and all of the momentum."""
        states = [self.optimizers[0].state[parameter] for _, parameter in self.named]
        momenta = (state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"] for state in states)
        return {
            "parameters": torch.cat([parameter.detach().reshape(-1) for _, parameter in self.named]),
            "momentum": torch.cat([each.reshape(-1) for each in momenta]),
        }


def figures_of(training: Training, optimizer: str, steps: int) -> Iterator[dict[str, Any]]:
    """All figures of one training, whose copies take each step together."""
    exact = Measured(training, optimizer, "exact")
    jobs = {method: Measured(training, optimizer, method) for method in METHODS}
    apart: dict[str, list[float]] = {method: [] for method in METHODS}
    fixed = {"workload": training.name, "optimizer": optimizer}
    for number in range(steps):
        loss = exact.step(number)
        for method, job in jobs.items():
            apart[method].append(abs(job.step(number) - loss))
            if number + 1 in LOOKED_AT:
                where = {**fixed, "method": method, "step": number + 1, "unit": "fraction"}
                yield from ({**where, **figure} for figure in drift(job.values(), exact.values()))
    for method, job in jobs.items():
        whole = {**fixed, "method": method, "samples": steps}
        yield {**whole, "metric": "deviation of the loss", "value": float(np.mean(apart[method])), "unit": "nat"}
        if job.bytes_plain:
            yield {**whole, "metric": "rate", "value": job.bytes_sent / job.bytes_plain, "unit": "fraction"}


def drift(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Relative distances of elements: median and 99th percentile."""
    for name, values in found.items():
        off = ((values - exact[name]).abs() / exact[name].abs()).nan_to_num(0.0).numpy()
        for percentile in (50, 99):
            yield {"metric": f"{name}, percentile {percentile}", "value": float(np.percentile(off, percentile))}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown with one line for each training and method."""
    last = max(row.get("step") or 0 for row in found)
    values = {
        (row["workload"], row["optimizer"], row["method"], row["metric"], row.get("step")): row["value"]
        for row in found
    }
    looked_at = [f"{name}, step {step}" for step in (2, last) for name in ("parameters", "momentum")]
    lines = [f"| | | bytes | loss | {' | '.join(looked_at)} |", "|---" * 8 + "|"]
    for workload, optimizer in dict.fromkeys((row["workload"], row["optimizer"]) for row in found):
        for method in METHODS:
            key = (workload, optimizer, method)
            rate = values.get((*key, "rate", None))
            cells = [f"{rate:.3f}" if rate else "", f"{values[(*key, 'deviation of the loss', None)]:.1e}"]
            for step in (2, last):
                for name in ("parameters", "momentum"):
                    cells.append(", ".join(f"{values[(*key, f'{name}, percentile {p}', step)]:.0e}" for p in (50, 99)))
            lines.append(f"| {workload}, {optimizer} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    cifar10: Cifar10, sst2: Sst2, steps: Annotated[int, typer.Option(help="Training steps.")] = LOOKED_AT[-1]
) -> Iterator[dict[str, Any]]:
    """Run both trainings with each optimizer."""
    for training in trainings(cifar10, sst2, BATCH):
        for optimizer in CHOSEN:
            for row in figures_of(training, optimizer, steps):
                yield {"dtype": "float32", "ranks": RANKS, "source": "measured", **row}
