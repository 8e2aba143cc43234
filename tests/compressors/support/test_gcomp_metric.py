"""The bound of GCOMP's metric, on states of real (short) trainings with each optimizer of torch that it knows.

Exact and truncated gradients go to two copies of the optimizer; what they make of the parameters is compared.
"""
# Shapes: W = ranks

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.papers.gcomp.hops import updated
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import gradwire.compressors as compressors
from gradwire.compressors.support.gcomp_metric import RULES, guard
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.kernels import active as kernels
from gradwire.sync.optimizer_view import OptimizerView

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd, decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "momentum, dampening, decay": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.01),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam, decay, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}
STATELESS = ("sgd", "sgd, decay")
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def delta(
    name: str,
    grad: np.ndarray,
    parameter: np.ndarray,
    state: Mapping[str, np.ndarray],
    group: Mapping[str, Any],
    steps: int = 0,
) -> np.ndarray:
    """Compute the metric in float64. `kernels.update_limits` computes δ · |grad| in float32.

    Args:
        name: Class name of the optimizer, one of `RULES`.
        grad: N elements of the mean over ranks, without a loss scale.
        parameter: N elements.
        state: State of the parameter in the optimizer.
        group: Parameter group with its hyperparameters.
        steps: Number of steps that the optimizer has taken.

    Returns:
        δ ≥ 0 for each element; infinite if the gradient is 0 or has no effect, 0 if nothing is known.
    """
    rule = RULES[name]
    numbers, names = rule.numbers(group, steps, float(group["lr"])), (rule.first(group), rule.second(group))
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


class Job:
    """A model in training, and the gradients of each rank at its next step."""

    def __init__(self, name: str, world_size: int, levels: str = "derived", steps: int = 12) -> None:
        torch.manual_seed(3)
        self.codec = compressors.make("gcomp", levels=levels)
        self.model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 5))
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        for step in range(steps):
            self._backward(step, 0)
            self.optimizer.step()
        self.grads = [self._backward(100, rank) for rank in range(world_size)]
        self.world_size = world_size

    def _backward(self, step: int, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(32, 20, generator=generator) * torch.logspace(-4, 0, 20)  # columns of all sizes
        targets = (inputs[:, -5:].argmax(1) + (torch.rand(32, generator=generator) < 0.1).long()) % 5
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        return [parameter.grad.detach().clone() for parameter in self.model.parameters()]

    def updated(self, grads: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """The parameters after a step with these gradients, in an arithmetic of this precision."""
        return updated(self.model, self.optimizer, grads, dtype)

    def sent(
        self, index: int, values: torch.Tensor, scale: float, share: float | None = None, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """What arrives of an encode on the path of a parameter's gradient."""
        named = list(self.model.named_parameters())
        state = OptimizerState(self.optimizer, named)
        state.loss_scale = loss_scale
        aux = state(named[index][0], ElementRange(0, values.numel()))
        spec = TensorSpec((values.numel(),))
        ctx = Context("w", world_size=self.world_size, spec=spec, aux=aux, error_share=share)
        payload = self.codec.encode(values.reshape(-1), ctx, scale=scale)
        return self.codec.decode(payload, ctx).view(values.shape)


def _parameters(job: Job) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in job.model.parameters()]


@each_optimizer
@pytest.mark.parametrize(("levels", "world_size"), [("derived", 1), ("derived", 4), ("derived", 128), ("sent", 16)])
def test_all_ranks_together_move_the_update_by_less_than_the_last_bit(name, levels, world_size) -> None:
    """Over the encodes of W ranks, in real arithmetic: less than 2^-23 of the parameter, with and without moments."""
    job = Job(name, world_size, levels)
    exact, cut, num_cut = [], [], 0
    for index in range(4):
        own = [grads[index] for grads in job.grads]
        exact.append(sum(grad.double() / world_size for grad in own))
        arrived = [job.sent(index, grad, 1 / world_size).double() for grad in own]
        whole = [(grad * (1 / world_size)).double() for grad in own]
        num_cut += sum(int((a != b).sum()) for a, b in zip(arrived, whole, strict=True))
        cut.append(exact[index] + sum(a - b for a, b in zip(arrived, whole, strict=True)))
    assert num_cut > 300  # of 1253 W elements
    for theta, one, two in zip(
        _parameters(job), job.updated(exact, torch.float64), job.updated(cut, torch.float64), strict=True
    ):
        assert ((one - two).abs() <= 2.0**-23 * theta.double().abs()).all()


@each_optimizer
@pytest.mark.parametrize("path", ["ring", "scatter_reduce"])
@pytest.mark.parametrize(("levels", "world_size"), [("derived", 4), ("derived", 128), ("sent", 16)])
def test_an_update_by_hops_in_float32_is_off_by_a_bit_at_most(name, levels, path, world_size) -> None:
    """Over all ranks and hops, roundings of the optimizer included: 2^-22 of the parameter, before or after."""
    job = Job(name, world_size, levels)
    exact, cut = [], []
    for index in range(4):
        own = [grads[index] for grads in job.grads]
        exact.append(_reduced(path, own, lambda values, scale, share: values * scale))
        cut.append(_reduced(path, own, lambda values, *how, index=index: job.sent(index, values, *how)))
    for theta, one, two in zip(
        _parameters(job), job.updated(exact, torch.float32), job.updated(cut, torch.float32), strict=True
    ):
        assert ((one - two).abs() <= 2.0**-22 * torch.maximum(theta.abs(), one.abs())).all()


def _reduced(path: str, own: list[torch.Tensor], send: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The mean as it arrives: each encode on the path goes through `send`."""
    scale = 1 / len(own)
    if path == "ring":
        total = send(own[0], scale, None)
        for grad in own[1:]:
            total = send(total + grad * scale, 1.0, None)
        return total
    shares = [OptimizerView(dict, merges_once=True).error_share(each, len(own)) for each in (False, True)]
    return send(sum((send(grad, scale, shares[0]) for grad in own[1:]), own[0] * scale), 1.0, shares[1])


@each_optimizer
def test_without_the_guard_many_ranks_would_break_the_bound(name, monkeypatch) -> None:
    """So that the tests above can fail."""
    monkeypatch.setattr("gradwire.compressors.gcomp.guard", lambda num_encodes, share: guard(1) / 4)
    job = Job(name, 16)
    off = []
    for index, theta in enumerate(_parameters(job)):
        own = [grads[index] for grads in job.grads]
        exact = [grads.double() for grads in job.grads[0]]
        whole = sum((grad / 16).double() for grad in own)
        arrived = sum(job.sent(index, grad, 1 / 16).double() for grad in own)
        exact[index] = whole
        cut = list(exact)
        cut[index] = arrived
        one, two = job.updated(exact, torch.float64)[index], job.updated(cut, torch.float64)[index]
        off.append(float(((one - two).abs() / theta.double().abs()).max()))
    assert max(off) > 2.0**-23


@each_optimizer
def test_kernels_give_the_metric_of_float64(name) -> None:
    job = Job(name, 1)
    named = list(job.model.named_parameters())
    for (key, parameter), grad in zip(named, job.grads[0], strict=True):
        aux = OptimizerState(job.optimizer, named)(key, ElementRange(0, grad.numel()))
        limits = np.empty(grad.numel(), np.float32)
        moments = [aux[moment].numpy() if moment in aux else None for moment in ("first", "second")]
        kernels.update_limits(aux["parameter"].numpy(), *moments, aux["numbers"].numpy(), limits)
        found = limits / np.abs(grad.numpy().reshape(-1))
        state = {
            each: value.numpy().reshape(-1) for each, value in job.optimizer.state[parameter].items() if each != "step"
        }
        expected = delta(
            type(job.optimizer).__name__, grad.numpy().reshape(-1), parameter.detach().numpy().reshape(-1), state,
            job.optimizer.param_groups[0], int(job.optimizer.state[parameter].get("step", 0)),
        )  # fmt: skip
        large = expected > 1e-3  # below, a difference of nearly equal numbers has few right digits, and no level does
        np.testing.assert_allclose(found[large], expected[large], rtol=2e-3)


def test_the_metric_of_plain_sgd_is_the_papers() -> None:
    theta, grad, group = np.array([2.0, -3.0, 0.0]), np.array([0.5, 0.5, 0.5]), {"lr": 0.1, "weight_decay": 0.2}
    group |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    expected = np.abs(theta / (0.1 * grad) - 0.2 * theta / grad)
    np.testing.assert_allclose(delta("SGD", grad, theta, {}, group), expected)


def _floats(size: int) -> st.SearchStrategy[np.ndarray]:
    """Float32 of any bits, of extreme magnitudes, or of usual ones, with zeros."""
    bits = hnp.arrays(np.uint32, size, elements=st.integers(0, 2**32 - 1)).map(lambda each: each.view(np.float32))
    extreme = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1.5e38, -3.4e38, np.inf, np.nan, 1.0])
    usual = hnp.arrays(np.float32, size, elements=st.floats(-1, 1, width=32))
    return st.one_of(bits, hnp.arrays(np.float32, size, elements=extreme), usual)


@pytest.mark.parametrize("name", ["sgd, decay", "momentum", "nesterov", "rmsprop", "adam", "adamw"])
@given(data=st.data())
def test_the_bound_holds_for_every_element_of_any_state(name, data) -> None:
    """gain · |error| · W ≤ 2^-23 |θ|, in float64, whatever the bits of gradient, parameter and moments are."""
    size = 40
    optimizer = OPTIMIZERS[name]([torch.ones(1)])
    group = optimizer.param_groups[0] | {"lr": data.draw(st.sampled_from([1e-6, 1e-3, 0.1, 1.0]))}
    rule, steps = RULES[type(optimizer).__name__], data.draw(st.sampled_from([1, 10, 10_000]))
    numbers = rule.numbers(group, steps, group["lr"])
    assert numbers is not None
    grad, theta, first, second = (data.draw(_floats(size)) for _ in range(4))
    with np.errstate(all="ignore"):
        second = np.abs(second)
    grad = np.where(np.isfinite(grad), grad, np.float32(3))
    moments = {"first": first} if rule.first(group) else {}
    moments |= {"second": second} if rule.second(group) else {}
    world_size, loss_scale = data.draw(st.sampled_from([1, 3, 128])), data.draw(st.sampled_from([1.0, 1024.0]))
    aux = {key: torch.from_numpy(values.copy()) for key, values in ({"parameter": theta} | moments).items()}
    aux |= {"numbers": torch.tensor(numbers, dtype=torch.float32), "loss_scale": torch.tensor(loss_scale)}
    ctx = Context("w", world_size=world_size, spec=TensorSpec((size,)), aux=aux | {"common": torch.tensor(True)})
    codec = compressors.make("gcomp", levels="derived")
    left = codec.decode(codec.encode(torch.from_numpy(grad), ctx), ctx).numpy()
    with np.errstate(all="ignore"):
        error = np.abs(left.astype(np.float64) - grad) / loss_scale
        m = moments.get("first", np.zeros(size, np.float32)).astype(np.float64)
        D = np.sqrt(second.astype(np.float64) * numbers.spread) + numbers.eps if "second" in moments else 1.0
        moved = (numbers.direct / D + numbers.through * np.abs(m) / D**2) * error * world_size
        fits = moved <= 2.0**-23 * np.abs(theta.astype(np.float64))
    assert np.isfinite(left).all()
    assert (fits | (error == 0)).all()


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_without_state_nothing_is_known(name) -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    assert not delta(name, np.ones(3), np.ones(3), {}, optimizer.param_groups[0]).any()
    assert OptimizerState(optimizer, [("w", parameter)])("w", ElementRange(0, 3)) == {}


def test_a_rate_of_zero_cuts_nothing_off_what_a_moment_remembers() -> None:
    job = Job("adam", 1)
    group = job.optimizer.param_groups[0]
    theta = job.model[0].weight.detach().numpy().reshape(-1)
    grad = job.grads[0][0].numpy().reshape(-1)
    state = {key: value.numpy().reshape(-1) for key, value in job.optimizer.state[job.model[0].weight].items()}
    assert not delta("Adam", grad, theta, state, {**group, "lr": 0.0}, 12).any()


def test_the_rules_are_of_optimizers_that_torch_has() -> None:
    assert all(issubclass(getattr(torch.optim, name), torch.optim.Optimizer) for name in RULES)
