"""Replicas of one rank, what cannot be copied, and what does not go together. Several ranks: tests/integration."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import OptionError


def module() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 2))


def test_one_rank_is_equal_to_itself() -> None:
    ddp = module()
    optimizer = torch.optim.Adam(ddp.parameters())
    with gw.attach(ddp, "none", optimizer=optimizer) as handle:
        ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        before = ddp.module.weight.detach().clone()
        assert handle.synchronize_replicas() == (0, (0.0,))
        assert torch.equal(ddp.module.weight, before)


def test_optimizer_state_that_cannot_be_copied_is_an_error_with_advice() -> None:
    ddp = module()
    with (
        gw.attach(ddp, "none") as handle,
        pytest.raises(OptionError, match=r"attach was not given the optimizer\. Pass optimizer="),
    ):
        handle.synchronize_replicas()
    optimizer = torch.optim.LBFGS(ddp.parameters())
    with gw.attach(ddp, "none", optimizer=optimizer) as handle:

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = ddp(torch.ones(3, 4)).square().sum()
            found.backward()
            return found

        optimizer.step(loss)
        with pytest.raises(OptionError, match=r"state of LBFGS has 'al', a list.* or use another optimizer\."):
            handle.synchronize_replicas()


def test_filling_needs_the_optimizer_and_no_scaler() -> None:
    ddp = module()
    server = gw.Aggregator("there:7071", fill_after=timedelta(seconds=0.1))
    plan, options = gw.Plan("thc", strategy="server", min_elements=0), gw.SyncOptions(server=server)
    with pytest.raises(OptionError, match=r"copies optimizer state\. Pass optimizer= to attach"):
        gw.attach(ddp, plan, options=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"Train in bfloat16, which needs no GradScaler, or leave fill_after out"):
        gw.attach(ddp, plan, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"), options=options)
