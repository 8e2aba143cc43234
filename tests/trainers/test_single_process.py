"""One process: nothing is sent, and what ranks have held is kept."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.core.spec import ElementRange
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.sync.resize import resize_state
from gradwire.trainers.single_process import SingleProcessHandle, attach_unless_alone


def alone(method: str = "threelc") -> object:
    return attach_unless_alone(nn.Linear(4, 2), method, 1, optimizer=None, scaler=None)


def test_one_process_is_logged_and_every_call_works(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        handle = alone()
    assert [record.message for record in caplog.records] == [
        "There is one process only, so no gradients are sent, and gradwire does nothing."
    ]
    assert isinstance(handle, SingleProcessHandle)
    with handle as entered:
        assert entered is handle
        assert handle.report().total.sent_bytes == 0
        assert handle.report(since="last").steps == 0
        assert handle.scalars() == {}
        handle.log_to(tmp_path / "log.csv").close()
        handle.log_to(lambda scalars, step: pytest.fail("there is nothing to log"), every=1)
        handle.stateful.load_state_dict(handle.stateful.state_dict())
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_are_never_averaged_need_no_condition_either() -> None:
    module = nn.Linear(4, 2)
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    handle = attach_unless_alone(module, "threelc", 1, optimizer=None, scaler=None)
    assert list(handle.synchronizer.tensors) == ["weight", "bias"]


def test_every_call_of_a_handle_but_the_hook_is_there() -> None:
    users = {name for name in dir(gw.Handle) if not name.startswith("_")}
    hooks = {"hook", "on_bucket", "commit_without_optimizer"}  # of a DDP module, which one process does not have
    assert users - hooks <= set(dir(SingleProcessHandle))


def test_a_wrong_name_is_an_error_with_one_process_too() -> None:
    with pytest.raises(gw.errors.UnknownNameError, match="threelc"):
        alone("threelcc")


def test_a_wrong_option_is_an_error_with_one_process_too() -> None:
    with pytest.raises(gw.errors.OptionTypeError, match="fidelty"):
        attach_unless_alone(nn.Linear(4, 2), "threelc", 1, optimizer=None, scaler=None, fidelty="exact")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_frozen_parameters_may_be_quantized(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    module.register_parameter("quantized", nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False))
    handle = attach_unless_alone(module, "threelc", 1, optimizer=None, scaler=None)
    assert list(handle.synchronizer.tensors) == ["0.weight", "0.bias"]


def test_one_process_would_train_without_momentum_if_a_plan_corrected_it() -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    plan = gw.Plan("threelc", feedback=gw.MomentumCorrection.of(optimizer))
    with pytest.raises(gw.errors.OptionError, match="at least two ranks"):
        attach_unless_alone(module, plan, 1, optimizer=optimizer, scaler=None)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_two_ranks_have_held_goes_through_one_process(frozen: bool) -> None:
    module = nn.Linear(4, 2)
    module.weight.requires_grad_(not frozen)  # it was trained, and has a residual
    states: list[dict[str, object]] = []
    of_handles = {"loss_scale": 65536.0, "clipped": True, "common": False, "rates": [{0: 0.5}]}
    for rank in range(2):
        residuals = Residuals()
        residuals.add(ResidualKey("weight", ElementRange(0, 8)), torch.full((8,), rank + 1.0).numpy())
        own = {"version": 2, "step": 9, "seed": 0, "rank": rank, "world_size": 2}
        states.append({**own, **of_handles, "residuals": residuals.state_dict()})
    handle = attach_unless_alone(module, "threelc", 1, optimizer=None, scaler=None)
    assert isinstance(handle, SingleProcessHandle)
    handle.load_state_dict({"version": 1, "states": states})
    again = resize_state(handle.gather_state_dict()["states"], 2)
    sums = sum(values for state in again for values in state["residuals"]["local"].get("weight", {}).values())
    assert isinstance(sums, torch.Tensor)
    assert sums.tolist() == [3.0] * 8
    assert [state["step"] for state in again] == [9, 9]
    for state in again:
        assert {key: state[key] for key in of_handles} == of_handles, "what the handles of several ranks need"
