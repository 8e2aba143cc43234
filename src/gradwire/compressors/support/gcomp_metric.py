"""The metric δ of GCOMP: how many bits of a gradient an optimizer's update does not notice.

An update is θ' = base − gain · g for a gradient g; base and gain depend only on the parameter, the optimizer's state
and its hyperparameters. δ = |base| / (gain · |g|). If δ > 2ⁿ, the last n bits of g's mantissa are below the last bit of
θ'. Here δ is a lower bound, so that this holds for any gradients of the other ranks:

- |base| is at most |θ|, and 0 if momentum could carry θ across 0.
- gain is at least |∂θ'/∂g| for every g. The second moment after the step is not known before it; its smallest possible
  value is used, β times the previous one. Adam's gain is the sum of two terms, since g also moves the denominator.
- Every encode on the path of an element removes bits. With W of them, each has a share s of the error, 1/W or another
  (see `OptimizerView.error_share`), so that together they move θ' by less than 2⁻ᵐ · |base| for a mantissa of m bits.
  Rounding θ' can add as much. The encode may change an element by 2⁻ᵐ · q, where q = s · |base| / gain. Truncated, an
  element g loses n bits if |g| · 2ⁿ < q. Rounded to nearest, it becomes a multiple of 2^(E − m + 1), where 2^E is the
  largest power of two up to q.
- Limits are computed in float32. base is at most |θ| in this arithmetic too; `SLACK` covers the roundings of gain.

Two effects are not bounded. A moment remembers an error in later steps, which may have a higher rate: therefore the
highest rate that a scheduler has recorded counts while the rate rises, and the current one once it has stopped. And a
factor that all elements share, such as that of `clip_grad_norm_`, depends on cut gradients; if that is detected, fewer
bits are cut (`gradwire.ddp.clipping`). `clip_grad_value_` is covered, since it brings no two gradients further apart.
If nothing is known of an update (no state yet, or a learning rate of 0 with moments), nothing is cut.

Source: GCOMP (SoCC 2024), section 5.1, table 2 and appendix A. Differences: those above; the paper's δ has signs, and
uses the second moment of the current step.
"""
# Shapes: N = elements of the range, W = ranks

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SLACK = 1 + 2**-12
"""Factor that covers the roundings of limits, which are computed in float32: fewer than 32 of 2⁻²⁴ each."""


class Numbers(NamedTuple):
    """Coefficients of a parameter group in one step; see `kernels.update_limits`."""

    keep: float = 1.0
    decay: float = 0.0
    pull: float = 0.0
    pull_over: float = 0.0
    direct: float = 0.0
    through: float = 0.0
    spread: float = 1.0
    eps: float = 0.0

    def allow(self, later: Numbers) -> bool:
        """Whether bits that were cut for these stay within the bound if `later` ones are applied."""
        grown = (after > before * (1 + 1e-6) for before, after in zip(self._moving(), later._moving(), strict=True))
        shrunk = (after < before * (1 - 1e-6) for before, after in zip(self._holding(), later._holding(), strict=True))
        return not any(grown) and not any(shrunk)

    def _moving(self) -> tuple[float, ...]:
        return self.decay, self.pull, self.pull_over, self.direct, self.through

    def _holding(self) -> tuple[float, ...]:
        return self.keep, self.spread, self.eps


class Rule(NamedTuple):
    """Update rule of an optimizer.

    Attributes:
        numbers: Function of a parameter group, the number of steps taken, and the learning rate that counts with
            moments; returns None for no truncation.
        first: Name of the first moment in the optimizer's state, or "".
        second: Name of the second moment, or "".
        refuses: Options of a group that the rule does not cover, in words, or "".
    """

    numbers: Callable[[Mapping[str, Any], int, float], Numbers | None]
    first: Callable[[Mapping[str, Any]], str]
    second: Callable[[Mapping[str, Any]], str]
    refuses: Callable[[Mapping[str, Any]], str] = lambda group: ""


def _sgd(group: Mapping[str, Any], steps: int, rate: float) -> Numbers | None:
    """Momentum b = μb + (1 − τ)(g + λθ); with Nesterov, g + λθ + μb is applied instead."""
    mu, tau, decay = float(group["momentum"]), float(group["dampening"]), float(group["weight_decay"])
    if not mu:
        rate = float(group["lr"])
        return Numbers(decay=rate * decay, direct=rate)
    if not rate:
        return None
    if group["nesterov"]:
        return Numbers(decay=rate * decay * (1 + mu), pull=rate * mu * mu, direct=rate * (1 + mu))
    return Numbers(decay=rate * decay * (1 - tau), pull=rate * mu, direct=rate * (1 - tau))


def _adagrad(group: Mapping[str, Any], steps: int, rate: float) -> Numbers | None:
    rate /= 1 + steps * float(group["lr_decay"])
    if not rate:
        return None
    return Numbers(decay=rate * float(group["weight_decay"]), direct=rate, eps=float(group["eps"]))


def _rmsprop(group: Mapping[str, Any], steps: int, rate: float) -> Numbers | None:
    if not rate:
        return None
    return Numbers(
        decay=rate * float(group["weight_decay"]),
        pull=rate * float(group["momentum"]),
        direct=rate,
        spread=float(group["alpha"]),
        eps=float(group["eps"]),
    )


def _adam(group: Mapping[str, Any], steps: int, rate: float) -> Numbers | None:
    decay = float(group["weight_decay"])
    if not rate:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    correction1, correction2 = 1 - beta1 ** (steps + 1), 1 - beta2 ** (steps + 1)
    decoupled = bool(group.get("decoupled_weight_decay", False))
    # With amsgrad, the largest earlier v is not multiplied by β₂.
    return Numbers(
        keep=1 - rate * decay if decoupled else 1.0,
        decay=0.0 if decoupled else rate * decay * (1 - beta1) / correction1,
        pull_over=rate * beta1 / correction1,
        direct=rate * (1 - beta1) / correction1,
        through=rate * beta1 / correction1 * math.sqrt((1 - beta2) / correction2),
        spread=(1.0 if group["amsgrad"] else beta2) / correction2,
        eps=float(group["eps"]),
    )


RULES: dict[str, Rule] = {
    "Adagrad": Rule(_adagrad, lambda group: "", lambda group: "sum"),
    "Adam": Rule(_adam, lambda group: "exp_avg", lambda group: "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"),
    "AdamW": Rule(
        lambda group, steps, rate: _adam({**group, "decoupled_weight_decay": True}, steps, rate),
        lambda group: "exp_avg",
        lambda group: "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq",
    ),
    "RMSprop": Rule(
        _rmsprop,
        lambda group: "momentum_buffer" if group["momentum"] else "",
        lambda group: "square_avg",
        lambda group: "centered=True" if group["centered"] else "",
    ),
    "SGD": Rule(_sgd, lambda group: "momentum_buffer" if group["momentum"] else "", lambda group: ""),
}
"""Rules by the class name in torch.optim. SGD may have momentum and Nesterov."""


def guard(num_encodes: int, share: float | None = None) -> float:
    """Lower limit of δ in units of 2ⁿ.

    Args:
        num_encodes: Number of encodes on the path of an element that remove bits.
        share: Share of the error that this encode may make; None for an equal one.
    """
    return SLACK * (num_encodes if share is None else 1 / share)
