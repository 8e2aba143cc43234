"""`attach` with the optimizers of its parameters: whom it takes, and what their steps do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError
from gradwire.core.spec import ElementRange
from gradwire.ddp.optimizers import MAX_BACKWARDS
from gradwire.residuals.slices import ResidualKey
from tests.core.test_optimizers import Subclass

Optimizer = torch.optim.Optimizer


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


def sgd(*modules: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=1e-3, **options)


def backward(ddp: nn.Module) -> None:
    ddp(torch.arange(20.0).view(5, 4)).square().sum().backward()


def staged(handle: gw.Handle, name: str) -> np.ndarray:
    """Stage a residual, as an encode does: a job of one rank has none."""
    values = handle.synchronizer.residuals.stage(ResidualKey(name, ElementRange(0, 1)))
    values[:] = 1.0
    return values


def committed(handle: gw.Handle) -> set[str]:
    return set(handle.synchronizer.residuals.norms())


# -- coverage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda ddp: sgd(ddp.module[0]),
            r"lacks 2 of the 4 parameters .*: '2.weight', '2.bias'\. .*Pass all optimizers",
        ),
        (
            lambda ddp: sgd(nn.Linear(4, 4)),
            r"lacks 4 of the 4 .*'0.weight', '0.bias', '2.weight' and 1 more.*create it from",
        ),
        (lambda ddp: [sgd(ddp.module[0]), sgd(ddp.module[1], nn.Linear(1, 1))], "lacks 2 of the 4"),
        (lambda ddp: Subclass(sgd(ddp.module[2])), "lacks 2 of the 4 .*'0.weight', '0.bias'.*leave optimizer= out"),
    ],
)
def test_optimizers_that_lack_parameters_are_refused_with_their_names(
    optimizer: Callable[[DistributedDataParallel], Any], message: str
) -> None:
    ddp = wrapped()
    with pytest.raises(AttachError, match=message):
        gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer(ddp))
    gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=[sgd(ddp.module[0]), sgd(ddp.module[2])]).detach()


def test_parameters_that_nobody_trains_need_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=sgd(model[2])).detach()


def test_parameters_that_are_frozen_at_attach_belong_to_their_optimizer_all_the_same() -> None:
    ddp = wrapped()
    ddp.module[0].bias.requires_grad_(False)  # DDP goes on to average it, once it is trained again
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=[first, second])
    staged(handle, "0.bias")
    first.step()
    assert committed(handle) == {"0.bias"}
    handle.detach()


@pytest.mark.parametrize("own_group", [False, True])
def test_parameters_that_an_optimizer_is_given_after_attach_are_committed_with_its_steps(own_group: bool) -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    body = nn.Linear(2, 2)
    ddp.module.append(body)
    body.requires_grad_(False)
    ddp = DistributedDataParallel(ddp.module)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=[first, second])
    body.requires_grad_(True)
    if own_group:
        second.add_param_group({"params": body.parameters()})
    else:
        second.param_groups[0]["params"].extend(body.parameters())
    staged(handle, "3.bias")
    second.step()
    assert committed(handle) == {"3.bias"}
    handle.detach()


def test_residuals_of_parameters_that_are_frozen_are_loaded_and_kept() -> None:
    ddp = wrapped()
    with gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=sgd(ddp)) as handle:
        staged(handle, "2.weight")
        handle.synchronizer.commit()
        saved = handle.state_dict()
    ddp.module[2].requires_grad_(False)
    with gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=sgd(ddp)) as handle:
        handle.load_state_dict(saved)
        assert committed(handle) == {"2.weight"} and "2.weight" not in handle.synchronizer.tensors
        backward(ddp)
        handle.synchronizer.commit()
        assert handle.state_dict()["residuals"]["local"].keys() == {"2.weight"}
        assert "2.weight" in str(handle.report())


# -- steps -------------------------------------------------------------------------------------------------------------


def test_each_of_several_optimizers_commits_the_residuals_of_its_own_parameters() -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=[first, second])
    backward(ddp)
    staged(handle, "0.weight"), staged(handle, "2.weight")
    second.step()
    assert committed(handle) == {"2.weight"}
    assert set(handle.state_dict()["residuals"]["local"]) == {"2.weight"}
    backward(ddp)
    staged(handle, "2.weight")[:] = 5.0
    second.step()
    assert committed(handle) == {"2.weight"}, "an optimizer that steps less often holds nobody up"
    first.step()
    assert committed(handle) == {"0.weight", "2.weight"}
    assert handle.synchronizer.residuals.norms()["2.weight"]["local"] == 5.0
    handle.detach()
    first.step()


def test_a_rollback_returns_each_parameter_to_its_own_optimizers_last_step() -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=(first, second))
    residuals = handle.synchronizer.residuals
    for name in ("0.weight", "2.weight"):
        staged(handle, name)
    first.step()
    for name in ("0.weight", "2.weight"):
        staged(handle, name)[:] = 7.0
    handle.synchronizer.rollback()
    assert residuals.source(ResidualKey("0.weight", ElementRange(0, 1))).tolist() == [1.0]
    assert residuals.source(ResidualKey("2.weight", ElementRange(0, 1))) is None
    assert not residuals.is_open
    handle.detach()


def test_a_wrapped_optimizer_commits_when_the_one_within_steps() -> None:
    ddp = wrapped()
    outer = Subclass(sgd(ddp))
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=outer)
    backward(ddp)
    staged(handle, "0.weight")
    outer.step()
    assert committed(handle) == {"0.weight"}
    handle.detach()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_backwards_without_a_step_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ddp = wrapped()
    old = sgd(ddp)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=old)
    for _ in range(MAX_BACKWARDS - 1):
        backward(ddp)
    old.step()
    new = sgd(ddp)
    for _ in range(MAX_BACKWARDS - 1):
        backward(ddp)
        new.step()
    assert not warnings(caplog)
    for _ in range(MAX_BACKWARDS):
        backward(ddp)
        new.step()
    (said,) = warnings(caplog)
    assert f"{MAX_BACKWARDS} backwards were synchronized without a step of SGD of '0.bias', '0.weight'" in said
    assert "detach and attach with that one" in said
    handle.detach()


def test_backwards_of_a_closure_are_none_without_a_step(caplog: pytest.LogCaptureFixture) -> None:
    ddp = wrapped()
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=MAX_BACKWARDS, tolerance_grad=0, tolerance_change=0)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer)
    num_backwards = 0

    def closure() -> torch.Tensor:
        nonlocal num_backwards
        num_backwards += 1
        optimizer.zero_grad()
        backward(ddp)
        return torch.ones(())

    optimizer.step(closure)
    assert num_backwards >= MAX_BACKWARDS
    assert not warnings(caplog)
    handle.detach()


def test_of_several_optimizers_the_one_that_does_not_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), torch.optim.Adam(ddp.module[2].parameters())
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=[first, second])
    for _ in range(MAX_BACKWARDS):
        backward(ddp)
        first.step()
    (said,) = warnings(caplog)
    assert "without a step of Adam of '2.bias', '2.weight'." in said
    handle.detach()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_that_attach_was_not_told_of_is_warned_of_once(
    unscale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the optimizer's step
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0 if unscale else 8.0)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    (said,) = warnings(caplog)
    assert "Pass scaler=" in said
    handle.detach()


def test_a_scaler_that_is_off_or_told_of_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for enabled in (True, False):
        ddp = wrapped()
        optimizer, scaler = sgd(ddp), torch.amp.GradScaler("cpu", enabled=enabled)
        handle = gw.attach(ddp, "none", optimizer=optimizer, scaler=scaler if enabled else None)
        scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        handle.detach()
    assert not warnings(caplog)


# -- gcomp and momentum with several -----------------------------------------------------------------------------------


def test_gcomp_sees_the_state_of_each_parameters_own_optimizer() -> None:
    ddp = wrapped()
    first = torch.optim.Adam(ddp.module[0].parameters(), lr=0.5)
    second = torch.optim.SGD(ddp.module[2].parameters(), lr=0.25)
    handle = gw.attach(ddp, gw.Plan({"*": "gcomp"}, min_elements=0), optimizer=[first, second])
    backward(ddp)
    for each in (first, second):
        each.step()
    aux = handle._optimizers.aux
    assert torch.equal(
        aux("0.weight", ElementRange(0, 3))["first"], first.state[ddp.module[0].weight]["exp_avg"].view(-1)[:3]
    )
    assert aux("2.weight", ElementRange(0, 3))["numbers"][4] == 0.25
    handle.detach()


@pytest.mark.parametrize("how", ["rollback", "load"])
def test_what_gcomp_has_cut_of_gradients_that_are_thrown_away_binds_no_later_step(how: str) -> None:
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = gw.attach(ddp, gw.Plan({"*": "gcomp"}, min_elements=0), optimizer=optimizer)
    aux, elements = handle._optimizers.aux, ElementRange(0, 3)
    backward(ddp)
    assert aux("0.weight", elements), "a bound"
    state = handle.state_dict()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(OptionError, match="have changed since backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    backward(ddp)
    assert aux("0.weight", elements)
    if how == "rollback":
        handle.rollback()
    else:
        handle.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = 0.2
    backward(ddp)
    assert aux("0.weight", elements), "the first pass of a step"
    optimizer.step()
    handle.detach()


def test_parameters_that_are_frozen_at_attach_may_be_trained_by_gcomp_later() -> None:
    """Their gradients are not cut."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(wrapped().module, find_unused_parameters=True)
    frozen = ddp.module[0].requires_grad_(False)
    optimizer = sgd(ddp.module[2])
    handle = gw.attach(ddp, gw.Plan({"0.*": "gcomp", "*": "threelc"}, min_elements=0), optimizer=optimizer)
    backward(ddp)
    optimizer.step()
    optimizer.add_param_group({"params": frozen.requires_grad_(True).parameters()})
    backward(ddp)
    optimizer.step()
    assert handle.synchronizer.need_optimizer == {"0.weight", "0.bias"}
    assert handle._optimizers.aux("0.weight", ElementRange(0, 1)) == {}
    handle.detach()


def test_clipping_of_one_optimizers_gradients_tells_nothing_of_the_others() -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    handle = gw.attach(ddp, gw.Plan("gcomp", min_elements=0), optimizer=[first, second])
    backward(ddp)
    for name in ("0.weight", "2.weight"):
        handle._optimizers.aux(name, ElementRange(0, 1))  # as an encode does
    first.step()
    nn.utils.clip_grad_norm_(ddp.module[2].parameters(), 1e-3)
    second.step()
    found = {
        name: bool(handle._optimizers.slices(name, ElementRange(0, 1))["clipped"]) for name in ("0.weight", "2.weight")
    }
    assert found == {"0.weight": False, "2.weight": True}
    assert handle.state_dict()["clipped"]
    handle.detach()


@pytest.mark.parametrize("in_closure", [False, True])
def test_optimizers_without_gcomp_skip_the_step_after_a_mismatch_too(in_closure: bool) -> None:
    """If norms are clipped over all parameters, the NaN of gcomp's are in all gradients."""
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2])
    plan = gw.Plan({"0.*": "gcomp", "*": "none"}, min_elements=0)
    handle = gw.attach(ddp, plan, optimizer=[first, second])
    before = ddp.module[2].weight.clone()

    def closure() -> float:
        backward(ddp)
        handle._optimizers.note_mismatch()
        for each in ddp.parameters():
            each.grad.fill_(torch.nan)
        return 0.0

    if in_closure:
        second.step(closure)
    else:
        closure()
        second.step()
    assert torch.equal(ddp.module[2].weight, before)
    handle.detach()


def test_gcomp_refuses_a_parameter_of_two_optimizers_and_auto_leaves_it_out(caplog: pytest.LogCaptureFixture) -> None:
    ddp = wrapped()
    both = [sgd(ddp), torch.optim.Adam(ddp.parameters())]
    with pytest.raises(OptionError, match=r"has two: SGD and Adam of .*Use \"lossless\" for it"):
        gw.attach(ddp, gw.Plan("gcomp", min_elements=0), optimizer=both)
    with caplog.at_level(logging.INFO, logger="gradwire"):
        gw.attach(ddp, "auto", optimizer=both).detach()
    assert "auto leaves gcomp out" in caplog.text


def test_momentum_of_any_of_several_optimizers_would_be_applied_twice() -> None:
    ddp = wrapped()
    first, second = sgd(ddp.module[0]), sgd(ddp.module[2], momentum=0.9)
    with pytest.raises(AttachError, match=r"momentum=0\.9 for '2\.weight': momentum would be applied twice"):
        gw.attach(ddp, gw.Plan("topk", min_elements=0, feedback="momentum"), optimizer=[first, second])
    third = sgd(ddp.module[0], momentum=0.9)
    policy = gw.MomentumCorrection.of([third, Subclass(second)])
    assert policy.momentum == 0.9
    assert {group["momentum"] for each in (second, third) for group in each.param_groups} == {0}
    with pytest.raises(OptionError, match="at least two ranks"):  # the check that comes after that of the optimizers
        gw.attach(ddp, gw.Plan("topk", min_elements=0, feedback=policy), optimizer=[second, third])


# -- the handle --------------------------------------------------------------------------------------------------------


def test_a_handle_prints_as_what_it_does() -> None:
    ddp = wrapped()
    handle = gw.attach(ddp, {"*.bias": "none", "*": "threelc:sparsity=1.5"})
    backward(ddp)
    start = "<gradwire.Handle: *.bias: none, *: threelc:sparsity=1.5; rank 0 of 1; step 1; "
    assert repr(handle) == f"{start}attached>"
    handle.detach()
    assert str(handle) == f"{start}detached>"
    handle = gw.attach(ddp, "auto")
    assert "auto, now by DDP's all-reduce; rank 0 of 1; step 0; attached" in repr(handle)
    handle.detach()


def test_an_option_of_a_compressor_is_not_an_argument_of_attach() -> None:
    with pytest.raises(TypeError, match=r'attach has no argument .ratio.*"topk:ratio=0.01", or gradwire.make'):
        gw.attach(wrapped(), "topk", ratio=0.01)
    gw.attach(wrapped(), "topk:ratio=0.01").detach()
