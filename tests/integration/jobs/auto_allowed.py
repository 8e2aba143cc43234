"""Jobs in which what `auto` may use depends on the gradients, the optimizer, or a rule."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, plan
from gradwire.planner.costs import Costs
from gradwire.planner.curves import Curve
from gradwire.planner.fidelity import RankedCompressor
from gradwire.tuning.auto import REST_STEPS, WINDOW, Autopilot
from gradwire.tuning.candidates import NATIVE, NATIVE_FP16, Candidate
from gradwire.tuning.change import START
from gradwire.tuning.trials import Script
from tests.integration.jobs.auto import CHEAP, DENSE, SLOW
from tests.integration.jobs.training import fingerprint


def too_large_for_fp16(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients of a summed loss, which are infinite in fp16."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    handle = gw.attach(ddp, "auto", optimizer=optimizer, fidelity="near-lossless")
    pilot = handle.autopilot
    assert pilot is not None
    losses = []
    while not pilot.decisions:
        optimizer.zero_grad()
        loss = (1e6 * ddp(torch.ones(8, 256) + rank).square()).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    names = [candidate.name for candidate in pilot.decisions[0].predicted]
    specs = sorted({row.spec for row in pilot.decisions[0].table.rows})
    handle.detach()
    return {"losses": losses, "candidates": names, "specs": specs, "hash": fingerprint(ddp.parameters())}


def watches(pilot: Autopilot, candidate: Candidate) -> Script[None]:
    """Use a candidate, however slow it is, until it is no longer allowed, and go on from there."""
    yield from pilot.switch(candidate)
    timing = yield from pilot._trials.time(warm_up=1)
    reason, timing = yield from pilot._watch(timing, strikes=1 << 30, rival=math.inf)
    yield from pilot._go_on(reason, timing)


def no_longer_allowed(rank: int, world_size: int, case: str) -> dict[str, Any]:
    """What is in use is no longer allowed: by momentum, gradients that are large or never finite, or a late rule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(case != "rule")  # DDP has buckets for it
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = gw.attach(ddp, {"0.*": "onebit", "*": "auto"} if case == "rule" else "auto", optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    costs = Costs(world_size, (SLOW,), {"none": DENSE, "threelc": CHEAP})
    method = RankedCompressor("threelc", ("allgather",))
    tensors = [PlannedTensor(name, tuple(each.shape)) for name, each in model.named_parameters()]
    table = plan(tensors, costs, [method], min_elements=0)
    given = {"momentum": Candidate.of(table), "fp16": NATIVE_FP16, "unknown": NATIVE_FP16, "rule": NATIVE}[case]

    pilot._script = watches(pilot, given)
    ways, factor = [], 1.0
    while not pilot.decisions:
        ways.append(pilot.current.name)
        if len(ways) == 4 * (REST_STEPS[-1] + WINDOW):
            factor = {"fp16": 1e7, "unknown": math.inf}.get(case, 1.0)
            optimizer.param_groups[0]["momentum"] = 0.9 if case in ("momentum", "unknown") else 0.0
        optimizer.zero_grad()
        (factor * ddp(torch.full((1, 64), 1.0 + rank)).sum()).backward()
        optimizer.step()
    (decision,) = pilot.decisions
    found = {
        "hash": fingerprint(model.parameters()), "ways": ways, "reason": decision.reason,
        "measured": [candidate.name for candidate in decision.measured], "chosen": decision.chosen.name,
        "method": handle.synchronizer.plan.entry("0.weight", TensorSpec((64, 64))).compressor.name,
    }  # fmt: skip
    handle.detach()
    return found


def late_gradients(rank: int, world_size: int) -> dict[str, Any]:
    """A layer that was frozen is trained when `auto` decides again, and its gradients are beyond fp16."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)  # DDP has buckets for it
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None

    def script() -> Script[None]:
        """As it would be, had it not chosen DDP's fp16 hook, by which the model were lost before it looks."""
        pilot.allowed.update((yield from pilot._inspect()))
        timing = yield from pilot._trials.time(warm_up=1)
        yield from pilot._decide(START, timing)
        yield from watches(pilot, NATIVE)

    pilot._script = script()
    allowed: list[list[str]] = []
    while len(allowed) < 2:
        optimizer.zero_grad()
        loss = ddp(torch.ones(1, 512)).sum()
        (loss + 1e6 * model[0].weight.sum() if allowed else loss).backward()
        optimizer.step()
        if len(pilot.decisions) > len(allowed):
            allowed.append([method.spec for method in pilot.allowed.methods])
            model[0].requires_grad_(True)
            optimizer.param_groups[0]["momentum"] = 0.9
    curves = [decision.costs.codecs["none"].encode for decision in pilot.decisions]
    found = {
        "allowed": allowed,
        "reasons": [decision.reason for decision in pilot.decisions],
        "measured": [[candidate.name for candidate in decision.measured] for decision in pilot.decisions],
        "sizes": [max(size for size, _ in curve.points) for curve in curves if isinstance(curve, Curve)],
    }
    dist.barrier()  # rank 0 has the store
    handle.detach()
    return found


def looks_again(rank: int, world_size: int, infinite: int) -> tuple[int, bool]:
    """The first gradients of one rank are infinite. Returns the steps looked at, and whether fp16 is allowed."""
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    handle = gw.attach(ddp, "auto")
    pilot = handle.autopilot
    assert pilot is not None
    found: list[bool] = []

    def script() -> Script[None]:
        state = yield from pilot._inspect()
        pilot.allowed.update(state)
        found.append("fp16" in [method.spec for method in pilot.allowed.methods])
        while True:
            yield

    pilot._script = script()
    steps = -1  # a step is looked at before the next one begins
    while not found:
        ddp.zero_grad()
        factor = math.inf if steps + 1 < infinite and rank == 1 else 1.0
        (factor * ddp(torch.ones(1, 8)).sum()).backward()
        steps += 1
    handle.detach()
    return steps, found[0]
