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
from gradwire.bench.probe import Prober
from gradwire.bench.probe_job import ProbeJob
from gradwire.core.events import Event
from gradwire.net import tcp
from gradwire.planner import PlannedTensor, plan
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import RankedCompressor
from gradwire.sync import peers
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.auto import Autopilot
from gradwire.tuning.candidates import Candidate
from gradwire.tuning.trials import Script
from tests.integration.jobs.training import batches, loss_of, model, wrap

TIMEOUT = 2.0  # seconds
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
PATIENCE = 10.0  # the same where a rank has to be named that never came: on a busy machine others are late, too


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
            os.kill(os.getpid(), SIGNALS[how])
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


class Doom:
    """The end of this rank: the time of it is left in a file, and the process is killed or stopped."""

    def __init__(self, how: str, folder: str) -> None:
        self._number = SIGNALS[how]
        self._clock = Path(folder) / "clock"

    def __call__(self, *_: Any, **__: Any) -> None:
        written = self._clock.with_suffix(".written")
        written.write_text(repr(time.time()))
        written.rename(self._clock)  # others wait for this file, and read it at once
        os.kill(os.getpid(), self._number)


def _outcome(error: BaseException, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """How a rank ended after the last one was lost. Rank 0, which has the store, waits until all others know."""
    seconds = time.time() - float((Path(folder) / "clock").read_text())
    (Path(folder) / f"ended-{rank}").touch()
    until = time.monotonic() + 20
    while rank == 0 and len(list(Path(folder).glob("ended-*"))) < world_size - 1 and time.monotonic() < until:
        time.sleep(0.01)
    typed = isinstance(error, gw.errors.SyncError)
    return {"typed": typed, "rank": getattr(error, "rank", None), "seconds": seconds, "message": repr(error)}


def lose_a_rank_in_a_call(rank: int, world_size: int, call: str, how: str, folder: str) -> dict[str, Any] | None:
    """The last rank is lost in a call that all ranks make.

    Args:
        call: ``"agreement"``, ``"rendezvous"`` or ``"connect"`` (within attach), ``"replan"`` or ``"detach"``.
        how: ``"kill"`` or ``"freeze"``.
        folder: Folder that all ranks share.
    """
    gw.attach(wrap(model()), "onebit").detach()  # kernels are compiled, and all ranks are here
    ddp = wrap(model())
    options = gw.SyncOptions(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    if rank == world_size - 1:
        owner, name = PLACES[call]
        setattr(owner, name, Doom(how, folder))
    try:
        handle = gw.attach(ddp, "onebit", options=options)
        loss_of(ddp, next(batches(rank, world_size))).backward()
        handle.synchronizer.commit()
        if call == "replan":
            handle.synchronizer.replan(gw.Plan("fp16"))
        handle.detach()
    except Exception as error:
        return _outcome(error, rank, world_size, folder)
    while not (Path(folder) / "clock").exists():  # nothing was needed of a rank that is lost in detach
        time.sleep(0.01)
    return _outcome(NotImplementedError("no error"), rank, world_size, folder)


PLACES: dict[str, tuple[Any, str]] = {
    "agreement": (peers, "agree"),
    "rendezvous": (tcp, "meet"),
    "connect": (tcp.TcpTransport, "_connect_all"),
    "replan": (Synchronizer, "_agree_on"),
    "detach": (tcp.TcpTransport, "close"),
}


def lose_a_rank_under_auto(rank: int, world_size: int, during: str, how: str, folder: str) -> dict[str, Any] | None:
    """The last rank is lost while links are probed, while codecs are measured, in a change of plan, or in a trial.

    Args:
        during: ``"links"``, ``"codecs"``, ``"plan"`` or ``"trial"``.
        how: ``"kill"`` or ``"freeze"``.
        folder: Folder that all ranks share.
    """
    ddp = wrap(model())
    handle = gw.attach(ddp, "auto", options=gw.SyncOptions(timeout=timedelta(seconds=PATIENCE)), check_every=0)
    assert handle.autopilot is not None
    pilot = handle.autopilot
    if during in ("plan", "trial"):
        pilot._script = _trial(pilot)
    if rank == world_size - 1:
        _die(handle, during, Doom(how, folder))
    try:
        for batch in itertools.islice(batches(rank, world_size), 40):
            ddp.zero_grad()
            loss_of(ddp, batch).backward()
    except Exception as error:
        return _outcome(error, rank, world_size, folder) | {"way": pilot.current.name}
    return None


def lose_a_rank_in_a_probe(rank: int, world_size: int, during: str, how: str, folder: str) -> dict[str, Any] | None:
    """The last rank is lost when its probe says that something begins.

    Args:
        during: Beginning of what it says.
        how: ``"kill"`` or ``"freeze"``.
        folder: Folder that all ranks share.
    """
    doom = Doom(how, folder)
    job = ProbeJob("model", model(), (torch.ones(2, 64),), loss=torch.sum)
    say = (lambda text: doom() if text.startswith(during) else None) if rank == world_size - 1 else (lambda text: None)
    try:
        Prober(job, "exact", ["onebit"], seconds=0.05, timeout=timedelta(seconds=PATIENCE), say=say).run()
    except Exception as error:
        return _outcome(error, rank, world_size, folder)
    return None


def _trial(pilot: Autopilot) -> Script[None]:
    """A plan is tried, whatever it is predicted to bring."""
    cheap = CodecCosts(LinearCost(0, 0), LinearCost(0, 0), LinearCost(0, 0), payload_bytes=LinearCost(0, 0.1))
    costs = Costs(2, (LinkCosts(1e-3, 1e-6),), {"none": cheap, "onebit": cheap})
    gradients = [PlannedTensor(name, spec.shape) for name, spec in pilot.allowed.tensors.items()]
    yield from pilot.switch(
        Candidate.of(plan(gradients, costs, [RankedCompressor("onebit", ("scatter_reduce",))], min_elements=0))
    )
    yield from pilot._trials.time()
    raise AssertionError("a rank should be dead by now")


def _die(handle: gw.Handle, during: str, doom: Doom) -> None:
    """Be lost at a certain event."""
    if during == "plan":
        handle.synchronizer._agree_on = doom  # type: ignore[method-assign, assignment]
        return
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
            doom()

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


def other_step(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 loads a state of another step than the others, whose random numbers are then other ones."""
    ddp = wrap(model())
    handle = gw.attach(ddp, gw.Plan("thc", min_elements=0))
    handle.load_state_dict({**handle.state_dict(), "step": 8 if rank == 1 else 7})
    try:
        loss_of(ddp, next(batches(rank, world_size))).backward()
    except gw.errors.SyncError as error:
        return {"type": type(error).__name__, "rank": error.rank, "said": str(error)}
    return {"type": None, "rank": None, "said": ""}
