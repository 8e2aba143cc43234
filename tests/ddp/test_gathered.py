"""The document of one rank: what it is, and which are refused. Several ranks: tests/integration."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


@pytest.fixture
def handle() -> gw.Handle:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    return gw.attach(ddp, gw.Plan("threelc", min_elements=0))


def test_a_document_has_the_state_of_each_rank_and_loads_safely(handle: gw.Handle) -> None:
    handle.synchronizer.step = 7
    document = handle.gather_state_dict()
    assert document == {"version": 1, "states": [handle.state_dict()]}
    saved = io.BytesIO()
    torch.save(document, saved)
    saved.seek(0)
    handle.synchronizer.step = 0
    handle.load_state_dict(torch.load(saved, weights_only=True))
    assert handle.synchronizer.step == 7


def test_a_document_of_another_version_is_refused(handle: gw.Handle) -> None:
    with pytest.raises(gw.errors.OptionError, match=r"has version 2, but this gradwire reads 1\. Load it with"):
        handle.load_state_dict({"version": 2, "states": [handle.state_dict()]})


def test_the_stateful_gives_a_checkpoint_one_entry_of_bytes(handle: gw.Handle) -> None:
    stateful = handle.stateful
    assert isinstance(stateful, Stateful)
    handle.synchronizer.step = 3
    saved = stateful.state_dict()
    assert [type(each) for each in saved.values()] == [bytes]
    handle.synchronizer.step = 0
    stateful.load_state_dict(saved)
    assert handle.synchronizer.step == 3
