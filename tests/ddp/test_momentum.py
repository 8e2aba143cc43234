"""`attach` with momentum correction: which optimizers it takes."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError
from gradwire.core.spec import ElementRange
from gradwire.ddp.momentum import MomentumCheck
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from tests.ddp.test_attach import wrapped

ADVICE = r"MomentumCorrection.of\(optimizer\).*Or create the optimizer without momentum"


@pytest.mark.parametrize(
    ("make", "has"),
    [
        (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), "SGD with momentum=0.9 for '0.weight'"),
        (lambda parameters: torch.optim.Adam(parameters), r"Adam with betas=\(0.9, 0.999\) for '0.weight'"),
    ],
)
def test_momentum_is_not_applied_twice(make, has: str) -> None:
    ddp = wrapped()
    with pytest.raises(AttachError, match=f"{has}: momentum would be applied twice. Pass .*{ADVICE}"):
        gw.attach(ddp, gw.Plan("topk", feedback="momentum"), optimizer=make(ddp.parameters()))


def test_momentum_correction_asks_for_the_optimizer() -> None:
    with pytest.raises(AttachError, match=f"attach needs optimizer= to check .*{ADVICE}"):
        gw.attach(wrapped(), gw.Plan("topk", feedback=gw.MomentumCorrection(0.9)))


def test_an_optimizer_whose_momentum_was_taken_is_accepted_and_a_job_of_one_rank_is_not() -> None:
    """The check of ranks comes after that of the optimizer, so that it tells that this one passed."""
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    with pytest.raises(OptionError, match=r"needs at least two ranks.*Keep the momentum in the optimizer"):
        gw.attach(ddp, gw.Plan("topk", feedback=gw.MomentumCorrection.of(optimizer)), optimizer=optimizer)


@pytest.mark.parametrize("any_step", [True, False])
def test_a_second_backward_of_a_step_is_an_error_or_with_several_optimizers_a_warning(
    any_step: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan, residuals = gw.Plan("topk", feedback=gw.MomentumCorrection(0.9)), Residuals()
    check = MomentumCheck([])
    check.before_backward(plan, residuals, any_step=any_step)
    residuals.stage(ResidualKey("w", ElementRange(0, 3), "velocity"))[:] = 1.0
    if any_step:
        for _ in range(2):
            check.before_backward(plan, residuals, any_step=True)
        (record,) = caplog.records
        assert "Let each optimizer step after each backward" in record.getMessage()
    else:
        with pytest.raises(OptionError, match=r"but the last under ddp\.no_sync\(\)"):
            check.before_backward(plan, residuals, any_step=False)
    check.before_backward(gw.Plan("topk"), residuals, any_step=False)
    residuals.commit()
    check.before_backward(plan, residuals, any_step=False)
