"""Jobs for `auto`: a forced way there and back, and a job in the lab whose links change."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.planner import PlannedTensor, PlanTable, plan
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import RankedCompressor
from gradwire.tuning.auto import REST_STEPS, TIMED_STEPS, WINDOW
from gradwire.tuning.candidates import NATIVE, Candidate
from gradwire.tuning.trials import Script
from tests.integration.jobs.training import fingerprint

SLOW = LinkCosts(1e-3, 1e-6)
CHEAP = CodecCosts(LinearCost(0, 1e-9), LinearCost(0, 1e-9), LinearCost(0, 1e-9), payload_bytes=LinearCost(0, 0.1))
DENSE = CodecCosts(LinearCost(0, 1e-9), LinearCost(0, 1e-9), LinearCost(0, 1e-9), payload_bytes=LinearCost(0, 4))


def there_and_back(rank: int, world_size: int, steps: int, dtype: str = "float32") -> dict[str, Any]:
    """By DDP, by a plan that compresses, and by DDP again; with gradients that do not depend on the parameters."""
    torch.manual_seed(0)
    element: torch.dtype = getattr(torch, dtype)
    model = nn.Linear(128, 64, bias=False).to(element)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)  # dense, so small a tensor travels in a batch
    pilot = handle.autopilot
    assert pilot is not None
    shape = tuple(model.weight.shape)
    costs = Costs(world_size, (SLOW,), {"none": DENSE, "onebit": CHEAP})
    table = plan(
        [PlannedTensor("weight", shape, element)], costs, [RankedCompressor("onebit", ("scatter_reduce",))],
        min_elements=0,
    )  # fmt: skip
    assert table.compresses
    begun = model.weight.detach().double()
    held, links = [], []

    def script() -> Script[None]:
        for candidate in (NATIVE, Candidate.of(table), NATIVE):
            yield from pilot.switch(candidate)
            for _ in range(steps):
                yield
            held.append(handle.synchronizer.residuals.holds_after_pruning("weight"))
            timing = yield from pilot._trials.time(warm_up=0)
            links.append(timing.link)
        yield from itertools.repeat(None)

    pilot._script = script()
    expected, ways = begun.clone(), []
    for step in range(3 * (steps + TIMED_STEPS) + 4):
        grads = [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + peer)) for peer in range(world_size)
        ]
        expected -= sum(grad.double() for grad in grads) / world_size
        optimizer.zero_grad()
        (ddp(torch.eye(128, dtype=element)) * grads[rank].T).sum().backward()
        optimizer.step()
        ways.append(pilot.current.name)
    error = (model.weight.double() - expected).norm() / (expected - begun).norm()
    found = {"hash": fingerprint(model.parameters()), "error": float(error), "held": held, "links": links, "ways": ways}
    found |= {"report": handle.report().as_dict(), "table": str(handle.report())}
    handle.detach()
    return found


def overflows(rank: int, world_size: int) -> dict[str, Any]:
    """The second gradient of the last rank is infinite, as a large loss scale makes them. Its step is skipped."""
    ddp = DistributedDataParallel(nn.Linear(256, 128, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    pilot, skipped = handle.autopilot, 0
    assert pilot is not None
    for step in itertools.takewhile(lambda _: not pilot.decisions, range(100_000)):
        optimizer.zero_grad()
        (ddp(torch.eye(256)).sum() * (torch.inf if (step, rank) == (1, world_size - 1) else 1.0)).backward()
        if all(parameter.grad.isfinite().all() for parameter in ddp.parameters() if parameter.grad is not None):
            optimizer.step()
        else:
            skipped += 1
    costs = pilot.decisions[0].costs
    handle.detach()
    return {"skipped": skipped, "bytes": {spec: codec.payload_bytes(1 << 12) for spec, codec in costs.codecs.items()}}


def corrects_momentum(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    """Dense, by a plan that compresses, and dense again, with momentum 0.9. Gradients do not depend on parameters."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)  # the bias travels dense throughout
    alone = nn.Linear(128, 64)
    alone.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0, momentum=0.9)
    expected = torch.optim.SGD(alone.double().parameters(), 1.0, momentum=0.9)
    correction = gw.MomentumCorrection.of(optimizer, masking=False)  # masking deletes velocities
    handle = gw.attach(ddp, gw.Plan("auto", feedback=correction), optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    costs = Costs(world_size, (SLOW,), {"none": DENSE, "threelc": CHEAP})
    tensors = [PlannedTensor(name, tuple(each.shape)) for name, each in model.named_parameters()]
    table = plan(
        tensors, costs, [RankedCompressor("threelc", ("scatter_reduce", "allgather"))], native=(),
        feedback=str(correction),
    )  # fmt: skip
    begun = model.weight.detach().double()
    dense, held = pilot.current, []

    def script() -> Script[None]:
        for candidate in (dense, Candidate.of(PlanTable.from_json(table.to_json())), dense):
            yield from pilot.switch(candidate)
            for _ in range(steps):
                yield
            held.append(handle.synchronizer.residuals.holds_after_pruning("weight"))
        yield from itertools.repeat(None)

    pilot._script = script()
    ways = []
    for step in range(3 * steps + 4):
        x = torch.randn(world_size, 16, 128, generator=torch.Generator().manual_seed(step))
        y = torch.randn(world_size, 16, 64, generator=torch.Generator().manual_seed(1000 + step))
        for each, module, inputs, outputs in (
            (optimizer, ddp, x[rank], y[rank]), (expected, alone, x.flatten(0, 1).double(), y.flatten(0, 1).double()),
        ):  # fmt: skip
            each.zero_grad()
            (module(inputs) * outputs).sum(1).mean().backward()
            each.step()
        ways.append(pilot.current.name)
    error = max(
        float((mine.double() - his).norm() / his.norm())
        for mine, his in zip(model.parameters(), alone.parameters(), strict=True)
    )
    found = {
        "hash": fingerprint(model.parameters()), "error": error, "held": held, "ways": ways,
        "entries": {name: (entry.compressor.name, entry.strategy) for name, entry in table.entries().items()},
        "moved": float((model.weight.double() - begun).norm()),
    }  # fmt: skip
    handle.detach()
    return found


def decides_about_the_rest(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    """A mapping names one tensor. Gradients do not depend on the parameters."""
    torch.manual_seed(0)
    model = nn.ParameterDict({name: torch.zeros(256, 64) for name in ("named", "rest")})
    ddp = DistributedDataParallel(Product(model))
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    handle = gw.attach(ddp, {"*.named": "onebit", "*": "auto"}, optimizer=optimizer, fidelity="exact")
    pilot = handle.autopilot
    assert pilot is not None
    means = {name: torch.zeros(256, 64, dtype=torch.float64) for name in model}
    for step in range(steps):
        grads = [
            {
                name: torch.randn(256, 64, generator=torch.Generator().manual_seed(1000 * step + 10 * peer + index))
                for index, name in enumerate(model)
            }
            for peer in range(world_size)
        ]
        for name, mean in means.items():
            mean -= sum(grad[name].double() for grad in grads) / world_size
        optimizer.zero_grad()
        ddp(grads[rank]).backward()
        optimizer.step()
    errors = {name: float((model[name].double() - mean).norm() / mean.norm()) for name, mean in means.items()}
    report = handle.report().as_dict()["tensors"]
    found = {
        "hash": fingerprint(model.parameters()), "errors": errors, "settled": pilot.settled,
        "planned": [[row.name for row in decision.table.rows] for decision in pilot.decisions],
        "method": report["parameters_.named"]["method"],
    }  # fmt: skip
    handle.detach()
    return found


class Product(nn.Module):
    """Gradients of its parameters are the input."""

    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.parameters_ = parameters

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.parameters_[name] * grad).sum() for name, grad in grads.items()]).sum()


def frozen_at_attach(rank: int, world_size: int) -> dict[str, Any]:
    """A plan for a module that was frozen in part after DDP had made its buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    costs = Costs(world_size, (SLOW,), {"none": DENSE, "onebit": CHEAP})
    compressor = RankedCompressor("onebit", ("allgather",))
    at_attach = plan([PlannedTensor("1.weight", (64, 64))], costs, [compressor], min_elements=0)

    def script() -> Script[None]:
        yield from pilot.switch(NATIVE)
        yield
        yield from pilot.switch(Candidate.of(at_attach))
        yield from itertools.repeat(None)

    pilot._script = script()
    for step in range(6):
        optimizer.zero_grad()
        ddp(torch.full((1, 64), 1.0 + rank + step)).sum().backward()
        optimizer.step()
    found = {"hash": fingerprint(model.parameters()), "way": pilot.current.name, "tensors": list(pilot.allowed.tensors)}
    handle.detach()
    return found


def at_rest(rank: int, world_size: int) -> dict[str, Any]:
    """Settled on DDP's own all-reduce, over two rests with a window between them."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    handle = gw.attach(ddp, "auto", optimizer=optimizer, check_every=20)
    pilot, one = handle.autopilot, handle.synchronizer
    assert pilot is not None

    def script() -> Script[None]:
        yield from pilot.switch(NATIVE)
        timing = yield from pilot._trials.time(warm_up=1)
        yield from pilot._watch(timing, strikes=1 << 30, rival=float("inf"))

    pilot._script = script()
    kinds: list[str] = []
    one.events.listen(lambda event: kinds.append(event.kind))
    rested, reported = [], []
    for _ in range(2 * (REST_STEPS[-1] + WINDOW) + TIMED_STEPS):
        kinds.clear()
        optimizer.zero_grad()
        ddp(torch.full((1, 16), float(rank))).sum().backward()
        rested.append("submit" not in kinds)
        optimizer.step()
        row = handle.report().as_dict()["tensors"]["bucket 0"]
        reported.append((one.step, row["syncs"], row["sent_bytes"]))
    found = {"rested": rested, "reported": reported, "hash": fingerprint(ddp.parameters())}
    handle.detach()
    return found


def agrees_on_costs(rank: int, world_size: int) -> list[Any]:
    """Costs as a document, and the largest of the ranks' numbers, which are more than one exchange holds."""
    from gradwire.sync.synchronizer import Synchronizer
    from gradwire.tuning.calibration import Calibration

    one = Synchronizer(None, "none")
    calibration = Calibration(one, 1 << 17)
    costs = calibration.costs(["fp16"])
    largest = calibration.largest(torch.arange(150.0, dtype=torch.float64).numpy() * (-1) ** rank)
    told = one.share("words" if rank == 0 else None)
    dist.barrier()  # rank 0 has the store
    one.close()
    return [costs.to_json(), largest.tolist(), told]


def small_tensors(rank: int, world_size: int) -> list[str]:
    """What is measured for a model without a tensor that is compressed."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 1)))
    handle = gw.attach(ddp, "auto")
    pilot = handle.autopilot
    assert pilot is not None
    while not pilot.settled:
        ddp(torch.ones(2, 40)).sum().backward()
    for _ in range(REST_STEPS[-1] + WINDOW + 3):  # until the answers of the first window have been read
        ddp(torch.ones(2, 40)).sum().backward()
    while not pilot.settled or pilot._answers is not None:  # steps of a busy machine may look like a change
        ddp(torch.ones(2, 40)).sum().backward()
    measured = list(pilot.decisions[0].costs.codecs)
    dist.barrier()  # rank 0 has the store
    handle.detach()
    return measured


def lab_main() -> None:
    """A rank in the lab: prints decisions with their times, up to a number of them or of seconds without one.

    With a momentum above 0, it is applied before compression.
    """
    limit, wanted, momentum = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3, momentum=momentum)
    feedback = gw.MomentumCorrection.of(optimizer) if momentum else None
    handle = gw.attach(ddp, gw.Plan("auto", feedback=feedback), optimizer=optimizer)
    assert handle.autopilot is not None
    data = torch.randn(8, 384, generator=torch.Generator().manual_seed(dist.get_rank()))
    deadline = time.monotonic() + limit
    told = 0
    while True:
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        if len(handle.autopilot.decisions) > told:
            told = len(handle.autopilot.decisions)
            if dist.get_rank() == 0:
                print(f"decided {handle.synchronizer.step} {handle.autopilot.decisions[-1]}", flush=True)
            time.sleep(1.0)  # time for the links to change before the first step that is watched
            deadline = time.monotonic() + limit
        over = torch.tensor([float(told >= wanted or time.monotonic() > deadline)])
        dist.all_reduce(over)
        if over > 0:
            break
    print(f"hash {fingerprint(model.parameters())}", flush=True)
    names = [str(decision.table.to_json()) for decision in handle.autopilot.decisions]
    assert all(PlanTable.from_json(name).rows for name in names)
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    lab_main()
