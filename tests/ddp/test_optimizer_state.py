"""What `gcomp` gets of the user's optimizer, and whom it refuses. Training is in tests/integration/test_gcomp.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange
from gradwire.ddp.optimizer_state import OptimizerState


class Other(torch.optim.Adam):
    """Who knows how it updates."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def trained(optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    made = optimizer(net.parameters())
    for _ in range(2):
        made.zero_grad()
        net(torch.arange(12.0).view(2, 6)).square().sum().backward()
        made.step()
    return net, made


def test_slices_are_of_the_range_and_of_the_users_own_memory() -> None:
    net, optimizer = trained(lambda p: torch.optim.Adam(p, lr=1e-3))
    weight = net[0].weight
    found = OptimizerState(optimizer, net.named_parameters())("0.weight", ElementRange(5, 7))
    assert torch.equal(found["parameter"], weight.detach().reshape(-1)[5:12])
    assert found["parameter"].data_ptr() == weight.data_ptr() + 20
    assert torch.equal(found["first"], optimizer.state[weight]["exp_avg"].reshape(-1)[5:12])
    assert torch.equal(found["second"], optimizer.state[weight]["exp_avg_sq"].reshape(-1)[5:12])
    assert found["loss_scale"] == 1


def test_parameters_that_were_frozen_have_no_slices() -> None:
    net, optimizer = trained(lambda p: torch.optim.Adam(p, lr=1e-3))
    state = OptimizerState(optimizer, [("0.weight", net[0].weight)])
    assert state("0.bias", ElementRange(0, 4)) == {}
    assert state.slices("0.bias", ElementRange(0, 4)) == {}


def test_slices_are_in_the_order_of_the_bucket_whatever_the_memory_format() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    found = OptimizerState(optimizer, net.named_parameters())("weight", ElementRange(7, 20))
    moments = optimizer.state[net.weight]
    for key, values in (("parameter", net.weight), ("first", moments["exp_avg"]), ("second", moments["exp_avg_sq"])):
        assert torch.equal(found[key], values.detach().permute(0, 2, 3, 1).reshape(-1)[7:27])


def test_hyper_parameters_are_those_of_the_parameters_group_at_the_moment() -> None:
    net = model()
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}], lr=0.25)
    state = OptimizerState(optimizer, net.named_parameters())
    assert state("0.weight", ElementRange(0, 4))["numbers"][4] == 0.25
    assert state("1.weight", ElementRange(0, 4))["numbers"][4] == 0.5
    optimizer.param_groups[1]["lr"] = 0.125
    assert state("1.weight", ElementRange(0, 4))["numbers"][4] == 0.125


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "LinearLR"])
def test_moments_are_cut_for_the_highest_rate_that_a_scheduler_says(scheduler) -> None:
    net, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    made = {
        "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=100),
        "LinearLR": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 0.01),
    }[scheduler]
    made()
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert OptimizerState(optimizer, net.named_parameters())("0.weight", ElementRange(0, 4))["numbers"][4] == 0.5


@pytest.mark.parametrize("lasting", [False, True])
def test_with_moments_the_current_rate_counts_once_it_has_stopped_rising(lasting) -> None:
    """Rates of a warm-up, a plateau, a decay to 0 and a restart; and the rates for which gradients are cut."""
    net, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    optimizer.param_groups[0]["initial_lr"] = 0.5
    state = OptimizerState(optimizer, net.named_parameters(), lasting=["0.weight"] if lasting else [])
    found = []
    for rate in (0.125, 0.25, 0.25, 0.5, 0.25, 0.125, 0.0, 0.125, 0.0625):
        optimizer.param_groups[0]["lr"] = rate
        state.begin_backward()
        found.append(float(state("0.weight", ElementRange(0, 4))["numbers"][4]))
        state.before_step([])
    assert found == ([0.5] * 9 if lasting else [0.5, 0.5, 0.25, 0.5, 0.25, 0.125, 0.5, 0.5, 0.0625])


@pytest.mark.parametrize(
    ("change", "refused"),
    [({"lr": 0.5}, True), ({"lr": 0.125}, False), ({"weight_decay": 0.1}, True), ({"lr": 0.0}, False), ({}, False)],
)
def test_what_is_applied_may_not_be_larger_than_what_was_cut_for(change, refused) -> None:
    net, optimizer = trained(lambda p: torch.optim.AdamW(p, lr=0.25, weight_decay=0.01))
    state = OptimizerState(optimizer, net.named_parameters())
    for name, parameter in net.named_parameters():
        state(name, ElementRange(0, parameter.numel()))
    optimizer.param_groups[0].update(change)
    with pytest.raises(OptionError, match="Set them before backward") if refused else nullcontext():
        state.before_step([])
    state.before_step([])  # said once


def test_of_several_backwards_for_one_step_the_first_alone_is_cut() -> None:
    net, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.25))
    state = OptimizerState(optimizer, net.named_parameters())
    for step in range(2):
        for backward in range(3):
            state.begin_backward()
            assert bool(state("0.weight", ElementRange(0, 4))) == (backward == 0), step
        state.before_step([])


def test_nothing_is_cut_for_moments_at_a_rate_of_zero() -> None:
    for options in ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}):
        net, optimizer = trained(lambda p, options=options: torch.optim.SGD(p, lr=0.25, **options))
        optimizer.param_groups[0]["lr"] = 0.0
        assert not OptimizerState(optimizer, net.named_parameters())("0.weight", ElementRange(0, 4))


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Rprop, Other])
def test_other_optimizers_are_refused_by_a_list_of_those_that_are_known(make) -> None:
    net = model()
    with pytest.raises(OptionError, match="Adagrad, Adam, AdamW, RMSprop, SGD") as caught:
        OptimizerState(make(net.parameters()), net.named_parameters())
    assert make.__name__ in str(caught.value)
    assert '"lossless"' in str(caught.value)


def test_what_of_an_optimizer_is_not_covered_and_parameters_that_are_not_its_are_refused_with_advice() -> None:
    net = model()
    with pytest.raises(OptionError, match=r"RMSprop with centered=True.*Leave that option out"):
        OptimizerState(torch.optim.RMSprop(net.parameters(), centered=True), net.named_parameters())
    with pytest.raises(
        OptionError, match=r'needs the optimizer of \'1.weight\'.*Pass the one that has it.*"1.weight": "lossless"'
    ):
        OptimizerState(torch.optim.SGD(net[0].parameters(), lr=0.1), net.named_parameters())


def test_attaching_asks_for_the_optimizer_where_gcomp_is_and_only_there() -> None:
    with pytest.raises(OptionError, match=r'Pass it, attach\(ddp, "gcomp", optimizer=opt\), or use "lossless"'):
        gw.attach(DistributedDataParallel(model()), gw.Plan("gcomp", min_elements=0))
    ddp = DistributedDataParallel(model())
    unknown = torch.optim.NAdam(ddp.parameters())
    gw.attach(ddp, gw.Plan("lossless", min_elements=0), optimizer=unknown).detach()
    with pytest.raises(OptionError, match="the update of NAdam"):
        gw.attach(ddp, {"0.*": "gcomp", "*": "lossless"}, optimizer=unknown)


def test_the_loss_scale_is_the_scalers() -> None:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    handle = gw.attach(ddp, gw.Plan("gcomp", min_elements=0), optimizer=optimizer, scaler=scaler)
    scaler.scale(ddp(torch.ones(2, 6)).square().sum()).backward()
    assert handle._optimizers.aux("0.weight", ElementRange(0, 1))["loss_scale"] == 512
    handle.detach()
