"""Jobs in which a rank dies, freezes, or does something else than its peers."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.events import Event
from gradwire.planner import PlannedTensor, plan
from gradwire.planner.costs import CodecCosts, Costs, LinearCost, LinkCosts
from gradwire.planner.fidelity import RankedCompressor
from gradwire.tuning.auto import Autopilot
from gradwire.tuning.candidates import Candidate
from gradwire.tuning.trials import Script
from tests.integration.jobs.training import batches, loss_of, model, wrap

TIMEOUT = 2.0  # seconds
PATIENCE = 6.0  # the same where a rank has to be named that never came: on a busy machine others are late, too


def lose_a_rank(rank: int, world_size: int, how: str, strategy: str) -> dict[str, Any] | None:
    """The last rank kills or stops itself in step 3; the others tell how their backward ended."""
    ddp = wrap(model())
    handle = gw.attach(
        ddp,
        gw.Plan("threelc", strategy=strategy, min_elements=0),
        options=gw.SyncOptions(timeout=timedelta(seconds=TIMEOUT)),
        check_every=0,
    )
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), 6)):
        if step == 3 and rank == world_size - 1:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[how])
        start = time.monotonic()
        try:
            ddp.zero_grad()
            loss_of(ddp, batch).backward()
        except Exception as error:
            return _account(error, handle, time.monotonic() - start, ddp, batch)
    return None


def _account(error: Exception, handle: gw.Handle, seconds: float, ddp: Any, batch: Any) -> dict[str, Any]:
    dump = json.loads(Path(getattr(error, "dump", "")).read_text())
    try:
        loss_of(ddp, batch).backward()
        again = None
    except Exception as second:
        again = type(second).__name__
    handle.detach()
    return {
        "type": type(error).__name__,
        "message": str(error),
        "rank": getattr(error, "rank", None),
        "tensor": getattr(error, "tensor", None),
        "phase": getattr(error, "phase", None),
        "seconds": seconds,
        "dump_rank": dump["error"]["rank"],
        "dump_events": len(dump["events"]),
        "again": again,
    }


def lose_a_rank_under_auto(rank: int, world_size: int, during: str, clock: str) -> dict[str, Any] | None:
    """The last rank kills itself while links are probed, while codecs are measured, or during a trial.

    Args:
        during: ``"links"``, ``"codecs"`` or ``"trial"``.
        clock: file in which the rank leaves the time of its death.
    """
    ddp = wrap(model())
    handle = gw.attach(ddp, "auto", options=gw.SyncOptions(timeout=timedelta(seconds=PATIENCE)), check_every=0)
    assert handle.autopilot is not None
    pilot = handle.autopilot
    if during == "trial":
        pilot._script = _trial(pilot)
    if rank == world_size - 1:
        _die(handle, during, Path(clock))
    try:
        for batch in itertools.islice(batches(rank, world_size), 40):
            ddp.zero_grad()
            loss_of(ddp, batch).backward()
    except gw.errors.SyncError as error:
        seconds = time.time() - float(Path(clock).read_text())
        return {"rank": error.rank, "seconds": seconds, "message": str(error), "way": pilot.current.name}
    return None


def _trial(pilot: Autopilot) -> Script[None]:
    """A plan is tried, whatever it is predicted to bring."""
    cheap = CodecCosts(LinearCost(0, 0), LinearCost(0, 0), LinearCost(0, 0), payload_bytes=LinearCost(0, 0.1))
    costs = Costs(2, (LinkCosts(1e-3, 1e-6),), {"none": cheap, "onebit": cheap})
    gradients = [PlannedTensor(name, spec.shape) for name, spec in pilot._tensors.items()]
    yield from pilot.switch(
        Candidate.of(plan(gradients, costs, [RankedCompressor("onebit", ("scatter_reduce",))], min_elements=0))
    )
    yield from pilot._trials.time()
    raise AssertionError("a rank should be dead by now")


def _die(handle: gw.Handle, during: str, clock: Path) -> None:
    """Be killed at a certain event."""
    seen: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind not in ("submit", "recv"):
            return
        seen.append(event.tensor)
        now = {
            "links": seen[-1] == "numbers" and "probe" in seen,  # the first figures about them are exchanged
            # The probe ends with figures that are exchanged; of the codecs there are more of them.
            "codecs": "probe" in seen and event.kind == "submit" and seen[-4:].count("numbers") == 4,
            "trial": seen[-1] not in ("probe", "numbers") and len(seen) > 40,
        }
        if now[during]:
            clock.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    handle.synchronizer.events.listen(on_event)


def late_rank(rank: int, world_size: int) -> dict[str, Any] | None:
    """A rank that is alive but does not come to `attach` until the others have given it up."""
    ddp = wrap(model())
    found = None
    if rank < world_size - 1:
        start = time.monotonic()
        try:
            gw.attach(ddp, "threelc", options=gw.SyncOptions(timeout=timedelta(seconds=PATIENCE)))
        except Exception as error:
            seconds = time.monotonic() - start
            found = {"type": type(error).__name__, "rank": getattr(error, "rank", None), "seconds": seconds}
    dist.barrier()  # the store is rank 0's: it must outlive the others' look at it
    return found


def lonely_attach(rank: int, world_size: int) -> None:
    """Rank 0 alone attaches; the others train with plain DDP, whose all-reduce waits for it."""
    ddp = wrap(model())
    if rank == 0:
        gw.attach(ddp, "threelc", options=gw.SyncOptions(timeout=timedelta(seconds=TIMEOUT)))
    loss_of(ddp, next(batches(rank, world_size))).backward()


def stalled_rank(rank: int, world_size: int) -> dict[str, Any]:
    """A rank that is alive and attached but does not join the step: the others wait out `stall_timeout`."""
    ddp = wrap(model())
    limits = gw.SyncOptions(timedelta(seconds=TIMEOUT), stall_timeout=timedelta(seconds=4))
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), options=limits)
    batch = next(batches(rank, world_size))
    for _ in range(2):  # DDP rebuilds its buckets in the second, with a collective of its own
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
    start = time.monotonic()
    if rank == world_size - 1:
        # Waits for the verdict of the others, with its transport alive.
        try:
            while time.monotonic() - start < 20:
                handle.synchronizer.wait()
                time.sleep(0.05)
        except gw.errors.SyncError as error:
            return {"type": type(error).__name__, "rank": error.rank, "seconds": time.monotonic() - start}
        return {"type": None, "rank": None, "seconds": time.monotonic() - start}
    try:
        loss_of(ddp, batch).backward()
    except gw.errors.SyncError as error:
        return {"type": type(error).__name__, "rank": error.rank, "seconds": time.monotonic() - start}
    raise AssertionError("backward without all ranks must not succeed")


def strayed_replica(rank: int, world_size: int) -> dict[str, Any]:
    """One bit of one parameter of rank 1 is turned; the replica check must find it and name the rank."""
    ddp = wrap(model())
    handle = gw.attach(ddp, "none", check_every=3)
    batch = next(batches(rank, world_size))
    for step in range(8):
        if step == 4 and rank == 1:
            with torch.no_grad():
                next(ddp.parameters()).view(-1)[11:12].view(torch.int32).bitwise_xor_(1)
        ddp.zero_grad()
        try:
            loss_of(ddp, batch).backward()
        except gw.errors.SyncError as error:
            return {"type": type(error).__name__, "rank": error.rank, "step": step}
    handle.detach()
    return {"type": None, "rank": None, "step": None}
