"""A live rank that is late is not treated as frozen before the stall timeout, whatever the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.errors import PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.group import GroupInfo
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

TIMEOUT = 4.0  # seconds; 15 ranks in five jobs meet within it
LATE = 9.0  # longer than twice the timeout
SPEC = TensorSpec((100,))


def step(one: Synchronizer) -> None:
    one.submit([GradientSlice("w", torch.ones(100))])
    one.wait()


CALLS: dict[str, Callable[[Synchronizer], Any]] = {
    "step": step,
    "exchange": lambda one: (one.exchange(np.ones(1)), one.wait()),
    "register": lambda one: one.register({"v": SPEC}),
    "replan": lambda one: one.replan(Plan("fp16")),
    "share": lambda one: one.share("words" if one.rank == 0 else None),
}


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_DUMP_DIR", str(tmp_path))


def outcomes(call: Callable[[Synchronizer], Any], late: Callable[[Synchronizer], Any], stall: float) -> list[Any]:
    """What three ranks return or raise, over TCP. The last one is late: it does something else before the call."""
    store = dist.HashStore()
    job = f"late-{id(store)}"  # synchronizers are counted by the group's name
    options = gw.SyncOptions(timedelta(seconds=TIMEOUT), stall_timeout=timedelta(seconds=stall))

    def run(rank: int) -> Any:
        one = Synchronizer(GroupInfo(rank, 3, store, job), "none", tensors={"w": SPEC}, options=options)
        try:
            step(one)  # others may have failed before this rank has ended it
            if rank == 2 and late(one):
                return None
            return call(one)
        except SyncError as error:
            return error
        finally:
            one.close()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3), timeout=60))


def evaluate(one: Synchronizer) -> None:
    threading.Event().wait(LATE)


@pytest.mark.ci
def test_a_live_rank_may_be_late() -> None:
    """Whatever the call is. All are tried at the same time."""
    with ThreadPoolExecutor(len(CALLS)) as pool:
        for found in pool.map(lambda call: outcomes(call, evaluate, stall=60.0), CALLS.values()):
            assert not [each for each in found if isinstance(each, Exception)], found


@pytest.mark.ci
@pytest.mark.parametrize("name", ["step", "replan"])
def test_a_live_rank_that_stays_away_is_named_after_the_stall_timeout(name: str) -> None:
    for error in outcomes(CALLS[name], evaluate, stall=LATE / 2)[:2]:
        assert isinstance(error, (PeerTimeoutError, PeerFailedError)), error
        assert error.rank == 2


@pytest.mark.parametrize("name", ["register", "replan"])
def test_a_rank_that_leaves_ends_the_others_calls_at_once(name: str) -> None:
    """By its goodbye here; `tests.integration.test_faults` has the ways without one."""
    for error in outcomes(CALLS[name], lambda one: True, stall=600.0)[:2]:
        assert isinstance(error, (PeerLostError, PeerFailedError)), error
        assert error.rank == 2
