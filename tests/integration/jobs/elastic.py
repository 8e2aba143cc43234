"""Jobs that are restarted, and jobs that go on with another number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

SAVE_EVERY = 5
STEPS = 25  # of each size


def train(
    rank: int, world_size: int, folder: str, steps: int, deaths: dict[str, list[Any]], method: str, strategy: str
) -> dict[str, Any]:
    """Train `steps` steps with a checkpoint every few; go on from the latest one that all ranks have.

    Args:
        deaths: by number of restarts, (rank, step, where) at which that rank kills itself: within the backward, or
            when it has taken the step but not yet saved it.
    """
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=optimizer)
    death = deaths.get(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), [None, 0, ""])
    start = _resume(Path(folder), rank, ddp, optimizer, handle)
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), start, steps), start):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch)
        if death == [rank, step, "backward"]:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        optimizer.step()
        if death == [rank, step, "save"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gw": handle.state_dict()}
            temporary = Path(folder) / f"{rank}.tmp"
            torch.save(state, temporary)
            temporary.rename(Path(folder) / f"{rank}.{step + 1}.pt")
    handle.detach()
    return {"hash": fingerprint(ddp.parameters()), "start": start}


def _resume(folder: Path, rank: int, ddp: Any, optimizer: torch.optim.Optimizer, handle: gw.Handle) -> int:
    """Load the newest checkpoint that every rank has written; return the step to go on with."""
    newest = torch.tensor(max([0, *(int(path.name.split(".")[1]) for path in folder.glob(f"{rank}.*.pt"))]))
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    step = int(newest)
    if step:
        state = torch.load(folder / f"{rank}.{step}.pt", weights_only=True)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gw"])
    return step


def resize(rank: int, world_size: int, folder: str, sizes: list[int], cases: list[Any]) -> dict[str, Any]:
    """One job after another, each with as many ranks as `sizes` says, each going on from the files of the last."""
    groups = [dist.new_group(list(range(size))) for size in sizes]
    found: dict[str, Any] = {}
    for method, strategy in cases:
        phases = found[f"{method} {strategy}"] = []
        for number, (size, group) in enumerate(zip(sizes, groups, strict=True)):
            if rank < size:
                phases.append(_phase(rank, group, Path(folder), method, strategy, number, sizes[number - 1]))
            dist.barrier()
    return found


def _phase(
    rank: int, group: Any, folder: Path, method: str, strategy: str, number: int, old_size: int
) -> dict[str, Any]:
    ddp = wrap(model(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=optimizer, check_every=1)
    deviation, size = 0.0, 0.0
    if number:
        states = [torch.load(folder / f"{old}.{number - 1}.pt", weights_only=True) for old in range(old_size)]
        ddp.module.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(states[0]["optimizer"])
        handle.load_state_dict([state["gw"] for state in states])
        before = _total([state["gw"] for state in states])
        after = _total([handle.state_dict()])
        for name, values in before.items():
            mine = torch.zeros_like(values) if name not in after else after[name]
            mine = torch.cat([mine, torch.zeros(values.numel() - mine.numel(), dtype=torch.float64)])
            dist.all_reduce(mine, group=group)
            deviation = max(deviation, (mine - values).abs().max().item())
            size = max(size, values.abs().max().item())
    losses = []
    for batch in itertools.islice(batches(rank, group.size(), seed=number), STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gw": handle.state_dict()}
    torch.save(state, folder / f"{rank}.{number}.pt")
    handle.detach()
    mean = torch.tensor(losses)
    dist.all_reduce(mean, group=group)
    return {
        "hash": fingerprint(ddp.parameters()),
        "losses": [mean[:8].mean().item() / group.size(), mean[-8:].mean().item() / group.size()],
        "deviation": deviation,
        "size": size,
        "step": handle.synchronizer.step,
    }


def _total(states: list[Any]) -> dict[str, torch.Tensor]:
    """By parameter, the sum of what the states of some ranks hold in both roles."""
    numels = {name: parameter.numel() for name, parameter in model().named_parameters()}
    totals: dict[str, torch.Tensor] = {}
    for state, role in itertools.product(states, ("local", "aggregate")):
        for name, pieces in state["residuals"][role].items():
            total = totals.setdefault(name, torch.zeros(numels[name], dtype=torch.float64))
            for offset, values in pieces.items():
                total[int(offset) : int(offset) + values.numel()] += values
    return totals


def main() -> None:
    """One rank under torchrun: parameters as JSON, results into the folder. After the job the same, unbroken."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size, parameters = dist.get_rank(), dist.get_world_size(), json.loads(sys.argv[1])
    folder = Path(parameters["folder"])
    broken = train(rank, world_size, **parameters)
    (folder / "unbroken").mkdir(exist_ok=True)
    unbroken = train(rank, world_size, **(parameters | {"folder": str(folder / "unbroken"), "deaths": {}}))
    (folder / f"{rank}.json").write_text(json.dumps([broken, unbroken]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
