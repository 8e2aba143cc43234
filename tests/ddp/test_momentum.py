"""`attach` with momentum correction: which optimizers it takes."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError
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
