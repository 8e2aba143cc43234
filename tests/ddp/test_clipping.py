"""Changes of averaged gradients before the optimizer's step, and how `gcomp` reacts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.clipping import AfterAveraging, is_power_of_two

Change = Callable[[list[nn.Parameter]], Any]


def scaled(factor: float) -> Change:
    return lambda parameters: [parameter.grad.mul_(factor) for parameter in parameters]


def norm_clipped(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.01)


def value_clipped(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, 0.05)


def nothing(parameters: list[nn.Parameter]) -> None:
    pass


def trained(change: Change, method: Any = "gcomp", state: Any = None, **options: Any) -> gw.Handle:
    """One step of a job, after which gradients were changed so."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
    handle = gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer, **options)
    if state is not None:
        handle.load_state_dict(state)
    ddp(torch.randn(8, 30)).square().sum().backward()
    change(list(ddp.parameters()))
    if handle._optimizers.states:
        handle._optimizers.aux("0.weight", ElementRange(0, 1))  # as an encode does; a job of one rank has none
    optimizer.step()
    return handle


def clipped(handle: gw.Handle) -> bool:
    return bool(handle._optimizers.aux("0.weight", ElementRange(0, 5))["clipped"])


@pytest.mark.parametrize("change", [nothing, value_clipped, scaled(2.0**-16)])
def test_what_leaves_the_bound_as_it_is_changes_nothing(change, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        assert not clipped(trained(change))
    assert not caplog.records


def test_clipping_by_norm_is_noticed_said_once_and_saved(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        handle = trained(norm_clipped)
        assert clipped(handle)
        assert clipped(trained(nothing, state=handle.state_dict()))
    assert len(caplog.records) == 1
    assert 'Use gw.make("gcomp", clipped=True)' in caplog.text


def first_clipped(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters[:2], 0.01)


def rows_clipped(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters[::2]:
        parameter.grad.mul_((0.1 / parameter.grad.norm(dim=1, keepdim=True)).clamp(max=1.0))


@pytest.mark.parametrize("change", [first_clipped, rows_clipped])
def test_clipping_of_some_gradients_or_by_rows_is_noticed(change) -> None:
    assert clipped(trained(change))


@pytest.mark.parametrize("factor", [4.0, 3.0])
def test_gradients_that_were_made_larger_than_a_loss_scale_has_them_are_refused(factor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with pytest.raises(OptionError, match=f"multiplied by {factor:g}"):
        trained(scaled(factor / 65536.0), scaler=scaler)


def test_gradients_that_were_made_larger_are_refused_with_advice() -> None:
    with pytest.raises(OptionError, match='Multiply the loss instead, or use "lossless"'):
        trained(scaled(3.0))
    trained(scaled(3.0), method="lossless").detach()


def test_a_loss_scale_of_any_size_is_taken_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    assert not clipped(trained(scaled(1 / 1000.0), scaler=scaler))


@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 2.0**-17), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
)
def test_with_clipping_cuts_leave_the_norm(dtype, relative) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = (torch.randn(5000, generator=generator) * 1e-3).to(dtype)
    aux = {
        "parameter": torch.ones(5000, dtype=dtype),
        "numbers": torch.tensor([1, 0, 0, 0, 1e-3, 0, 1, 0], dtype=torch.float32),
        "loss_scale": torch.tensor(1.0),
    }
    ctx = Context("w", world_size=4, spec=TensorSpec.of(grad), aux=aux)
    noticed = Context("w", world_size=4, spec=TensorSpec.of(grad), aux={**aux, "clipped": torch.tensor(True)})
    plain, careful = gw.make("gcomp"), gw.make("gcomp", clipped=True)

    def cut(codec: Any, ctx: Context) -> float:
        found = codec.decode(codec.encode(grad, ctx), ctx)
        return float(((found.double() - grad.double()).abs() / grad.double().abs()).nan_to_num().max())

    assert cut(careful, ctx) == cut(plain, noticed) <= relative
    assert cut(plain, ctx) > max(relative, 2.0**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_gradient_has_a_factor_of_its_own(dtype) -> None:
    first, second = (nn.Parameter(torch.ones(100, dtype=dtype)) for _ in range(2))
    watched = AfterAveraging()

    def found(change: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        for seed, parameter in enumerate((first, second)):
            parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(dtype)
            watched.take(parameter, parameter.grad)
        second.grad = change(second.grad)
        return watched.factors()

    assert found(lambda grad: grad) == [1.0, 1.0]
    assert found(lambda grad: grad * 0.3) == [1.0, pytest.approx(0.3, rel=0.01)]
    for limit in (1.0, 0.1, 1e-3):
        assert found(lambda grad, limit=limit: grad.clamp(-limit, limit)) == [1.0, 1.0]
    by_row = torch.tensor([0.25, 1.0], dtype=dtype).repeat_interleave(50)
    assert math.isnan(found(lambda grad: grad * by_row)[1])
    assert math.isnan(found(torch.neg)[1])
    second.grad = None
    watched.take(first, first.grad)
    assert watched.factors() == [1.0]
    assert watched.factors() == []  # nothing was taken


def test_gradients_of_an_earlier_pass_have_no_factor() -> None:
    """A pass that was thrown away, whose largest gradients were others."""
    first, second = (nn.Parameter(torch.ones(100)) for _ in range(2))
    watched = AfterAveraging()
    for parameter in (first, second):
        watched.begin_backward()
        parameter.grad = torch.ones(100)
        watched.take(parameter, parameter.grad)
    first.grad *= 2.0
    assert watched.factors() == [1.0]


def test_gradients_in_the_order_of_the_bucket_are_known_again() -> None:
    parameter = nn.Parameter(torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last))
    parameter.grad = torch.randn_like(parameter)
    watched = AfterAveraging()
    watched.take(parameter, parameter.grad.permute(0, 2, 3, 1).reshape(-1))  # as its bucket has it
    parameter.grad *= 0.3
    assert watched.factors() == [pytest.approx(0.3, rel=1e-5)]


def test_powers_of_two() -> None:
    assert is_power_of_two(0.25)
    assert is_power_of_two(2.0**-16 * (1 + 1e-7))
    assert not is_power_of_two(0.3)
