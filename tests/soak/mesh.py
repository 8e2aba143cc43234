"""Ranks that average gradients under changing plans, restarted from checkpoints when one of them is lost.

In the end, all ranks have the model of a job that nothing has happened to, bit for bit. What was produced is what was
applied plus what the residuals hold. A lost rank ends all others within twice the timeout, with one typed error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gradwire.core.spec import TensorSpec
from tests.soak import programs
from tests.soak.job import LONG_FREEZE, MARGIN, START, TIMEOUT, Fault, Host, Job
from tests.sync.harness import ranks

METHODS = ("none", "onebit", "threelc", "topk:ratio=0.05", "tbq", "lossless")
STRATEGIES = ("ring", "scatter_reduce", "allgather", "hierarchical")


class Mesh(Job):
    """See the module."""

    kind = "mesh"

    def __init__(self, seed: int, folder: Path, scale: float = 1.0, deadly: bool = True) -> None:
        super().__init__(seed, folder, scale, deadly)
        at = [0, *sorted(self.draw.sample(range(1, self.steps), self.draw.randint(0, 3)))]
        plans = [[step, self.draw.choice(METHODS), self.draw.choice(STRATEGIES)] for step in at]
        nodes = self.draw.choice((1, 2)) if self.ranks == 4 else 1
        self.parameters = {"seed": seed, "ranks": self.ranks, "steps": self.steps, "plans": plans, "nodes": nodes}
        self.outcome.faults["plan change"] = len(plans) - 1
        self.attempt = 0

    def start(self) -> None:
        """Start all ranks, and wait until they have met."""
        if not self.attempt:
            self.expected = unbroken(self.parameters)  # compiles all kernels, here rather than on all ranks at once
        parameters = {"job": self.parameters, "folder": str(self.folder), "attempt": self.attempt}
        self.hosts = {rank: Host(self, rank, "mesh", **parameters) for rank in range(self.ranks)}
        self.attempt += 1
        self.until(lambda: all("ready" in host.last for host in self.hosts.values()))

    def happen(self, fault: Fault) -> None:
        """One rank is lost: the others end with an error, and all start again."""
        victim = self.hosts[fault.host]
        others = [host for host in self.hosts.values() if host is not victim]
        began = time.time()
        self.lose(victim, fault)
        self.until(lambda: all(host.gone for host in others))
        for host in others:
            error = host.last.get("error")
            if error is None:
                if "end" in host.last:
                    continue  # it had all that it needed
                raise self.broken(f"rank {host.host} ended without an error.", host)
            if error["at"] - began > 2 * TIMEOUT + MARGIN:
                raise self.broken(f"rank {host.host} heard of a lost rank after {error['at'] - began:.1f} s.")
            if error["rank"] != fault.host:
                raise self.broken(f"rank {host.host} blames rank {error['rank']} for {fault}: {error['text']}", host)
        self.until(lambda: victim.gone, LONG_FREEZE + START)
        if fault.kind == "long freeze" and "error" not in victim.last and "end" not in victim.last:
            raise self.broken("the frozen rank ended without an error.", victim)
        self.start()

    def check(self) -> None:
        """See `Job`."""
        for rank, host in self.hosts.items():
            if host.last.get("end") != self.expected:
                raise self.broken(f"rank {rank} has another model than an unbroken job.", host)
        missing = [torch.load(self.folder / f"missing.{rank}.pt", weights_only=True) for rank in range(self.ranks)]
        for name in programs.SHAPES:
            total = torch.stack([each[name] for each in missing]).sum(0)
            if total.abs().max() > 1e-3 * self.steps**0.5:  # float32 arithmetic on numbers of about 1
                raise self.broken(f"of tensor {name}, up to {total.abs().max():g} of an element are lost.")


def unbroken(job: dict[str, Any]) -> str:
    """Digest of the model of a job without faults, with all ranks in this process."""
    states = [programs.State(job, rank) for rank in range(job["ranks"])]
    specs = {name: TensorSpec(shape) for name, shape in programs.SHAPES.items()}
    plan = states[0].plan(0)
    with ranks(job["ranks"], plan, timeout=60.0, seed=job["seed"], nodes=job["nodes"], tensors=specs) as group:
        group.each(lambda one: list(states[one.rank].run(one)))
    (found,) = {state.digest() for state in states}
    return found
