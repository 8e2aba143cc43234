"""The quantisation metric δ of GCOMP: how many bits of a gradient an optimizer's update does not notice.

An update is θ' = base − gain · g for a gradient g, with base and gain from the parameter, the optimizer's state and its
hyper-parameters alone. δ = |base| / (gain · |g|); where δ > 2ⁿ, the last n bits of g's mantissa are below the last bit
of θ'. Here all of that is a bound, so that what follows is true whatever the other ranks' gradients are:

- |base| is at most |θ|, and 0 where momentum could carry θ across 0.
- gain is at least |∂θ'/∂g| at every g. The second moment after the step is not known before it: it is taken to be β
  times the one before, its least value. Adam's is the sum of two terms, since g moves the denominator as well.
- Every encode on an element's path truncates. With W of them each is held to δ > W · 2ⁿ · 17/16, so that all together
  move θ' by less than 2⁻ᵐ · |θ| for a mantissa of m bits, to which rounding θ' itself can add as much.

What a truncation does to moments shows in later steps, by what the moment remembers, and is not bounded here. Nor is
what it does to others through a factor common to all of them, as `clip_grad_norm_` takes from a norm of truncated
gradients: where that is seen, fewer bits are cut (`gradwire.integrations.clipping`). `clip_grad_value_` is covered: it
brings no two gradients further apart. Where nothing is known of an update (no state yet, a learning rate of 0 with
moments), nothing is truncated.

Source: GCOMP (SoCC 2024), section 5.1, table 2 and appendix A. Differences: those above; the paper's δ has signs, and
takes the second moment of this step.
"""
# Shapes: N = elements of the range, W = ranks

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

SLACK = 17 / 16
"""On top of W · 2ⁿ: for the roundings of float32 arithmetic between a gradient and its parameter."""


class Numbers(NamedTuple):
    """What a parameter group and a step come to; see `kernels.update_limits`."""

    keep: float = 1.0
    decay: float = 0.0
    pull: float = 0.0
    pull_over: float = 0.0
    direct: float = 0.0
    through: float = 0.0
    spread: float = 1.0
    eps: float = 0.0

    def allow(self, later: Numbers) -> bool:
        """Whether what was cut for these stays within the bound where `later` ones are applied."""
        grown = (after > before * (1 + 1e-6) for before, after in zip(self._moving(), later._moving(), strict=True))
        shrunk = (after < before * (1 - 1e-6) for before, after in zip(self._holding(), later._holding(), strict=True))
        return not any(grown) and not any(shrunk)

    def _moving(self) -> tuple[float, ...]:
        return self.decay, self.pull, self.pull_over, self.direct, self.through

    def _holding(self) -> tuple[float, ...]:
        return self.keep, self.spread, self.eps


class Rule(NamedTuple):
    """How one optimizer updates.

    Attributes:
        numbers: from a parameter group's hyper-parameters and the number of steps taken; None for no truncation.
        first: name of the first moment in the optimizer's state, or "".
        second: name of the second moment, or "".
        refuses: what of a group it does not cover, in words, or "".
    """

    numbers: Callable[[Mapping[str, Any], int], Numbers | None]
    first: Callable[[Mapping[str, Any]], str]
    second: Callable[[Mapping[str, Any]], str]
    refuses: Callable[[Mapping[str, Any]], str] = lambda group: ""


def _rate(group: Mapping[str, Any]) -> float:
    return float(group["lr"])


def _lasting_rate(group: Mapping[str, Any]) -> float:
    """The rate that a moment of today may be applied with: the highest that a scheduler of torch has written down."""
    return max(_rate(group), float(group.get("initial_lr", 0.0)), float(group.get("max_lr", 0.0)))


def _sgd(group: Mapping[str, Any], steps: int) -> Numbers | None:
    """Momentum b = μb + (1 − τ)(g + λθ); with Nesterov, g + λθ + μb is applied in its place."""
    mu, tau, decay = float(group["momentum"]), float(group["dampening"]), float(group["weight_decay"])
    if not mu:
        rate = _rate(group)
        return Numbers(decay=rate * decay, direct=rate)
    rate = _lasting_rate(group)
    if not rate:
        return None
    if group["nesterov"]:
        return Numbers(decay=rate * decay * (1 + mu), pull=rate * mu * mu, direct=rate * (1 + mu))
    return Numbers(decay=rate * decay * (1 - tau), pull=rate * mu, direct=rate * (1 - tau))


def _adagrad(group: Mapping[str, Any], steps: int) -> Numbers | None:
    rate = _lasting_rate(group) / (1 + steps * float(group["lr_decay"]))
    if not rate:
        return None
    return Numbers(decay=rate * float(group["weight_decay"]), direct=rate, eps=float(group["eps"]))


def _rmsprop(group: Mapping[str, Any], steps: int) -> Numbers | None:
    rate = _lasting_rate(group)
    if not rate:
        return None
    return Numbers(
        decay=rate * float(group["weight_decay"]),
        pull=rate * float(group["momentum"]),
        direct=rate,
        spread=float(group["alpha"]),
        eps=float(group["eps"]),
    )


def _adam(group: Mapping[str, Any], steps: int) -> Numbers | None:
    rate, decay = _lasting_rate(group), float(group["weight_decay"])
    if not rate:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    correction1, correction2 = 1 - beta1 ** (steps + 1), 1 - beta2 ** (steps + 1)
    decoupled = bool(group.get("decoupled_weight_decay", False))
    # The largest of v before is not multiplied by β₂.
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
        lambda group, steps: _adam({**group, "decoupled_weight_decay": True}, steps),
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
"""By the name of the optimizer's class in torch.optim. SGD is plain, momentum and Nesterov."""


def guard(num_encodes: int) -> float:
    """What δ must be above, in units of 2ⁿ, where so many encodes on an element's path truncate."""
    return num_encodes * SLACK


def delta(
    name: str,
    grad: np.ndarray,
    parameter: np.ndarray,
    state: Mapping[str, np.ndarray],
    group: Mapping[str, Any],
    steps: int = 0,
) -> np.ndarray:
    """The metric in float64: what `kernels.update_limits` gives by float32, over |grad|.

    Args:
        name: of the optimizer's class: one of `RULES`.
        grad: N elements, of the mean over ranks, without a loss scale.
        parameter: N elements.
        state: the optimizer's state of the parameter.
        group: the hyper-parameters of its group.
        steps: how many steps it has taken.

    Returns:
        δ, of at least 0, infinite where the gradient is 0 or has no effect. Zeros where nothing is known.
    """
    rule = RULES[name]
    numbers, names = rule.numbers(group, steps), (rule.first(group), rule.second(group))
    if numbers is None or any(each and each not in state for each in names):
        return np.zeros(grad.size)
    keep, decay, pull, pull_over, direct, through, spread, eps = numbers
    theta = parameter.astype(np.float64)
    m = state[names[0]].astype(np.float64) if names[0] else np.zeros(theta.size)
    with np.errstate(all="ignore"):
        D = np.sqrt(state[names[1]].astype(np.float64) * spread) + eps if names[1] else np.ones(theta.size)
        kept = np.fmax(keep - decay / D, 0)
        pulled = np.fmax(np.sign(theta) * m * (pull + pull_over / D), 0)
        base = np.fmax(np.abs(theta) * kept - pulled, 0)
        gain = direct / D + through * np.abs(m) / D**2
        found: np.ndarray = base / (gain * np.abs(grad.astype(np.float64)))
    return np.where(np.isnan(found), 0.0, found)
