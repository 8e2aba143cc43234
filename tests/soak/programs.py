"""What a process of a job does: `python -m tests.soak.programs NAME PARAMETERS`. It says lines of JSON.

Each line has a kind and a value: ``ready``, ``step`` (number of steps done), ``end`` (digest of what was found),
``error`` (type, text and rank of the one typed error that a job may end with), ``failed`` (what must never happen).
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.core.errors import GradwireError
from gradwire.core.spec import TensorSpec
from gradwire.net.client import ConnectionOptions
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from gradwire.sync.group import GroupInfo
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.parameter_server import processes
from tests.schedules import jobs
from tests.soak.job import TIMEOUT

SHAPES = {"a": (40, 30), "b": (128, 100), "c": (2000,), "d": (300, 200), "e": (7,)}
SAVE_EVERY = 10
PORT = 7071


def say(kind: str, value: Any = None) -> None:
    """Print a line."""
    print(json.dumps([kind, value]), flush=True)


# -- mesh ----------------------------------------------------------------------------------------------------------


class State:
    """The model of one rank, and what it has produced and applied, both float64.

    Args:
        job: Parameters of the job: ``seed``, ``ranks``, ``steps`` and ``plans``, which are [step, method, strategy].
        rank: This rank.
    """

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank, self.step = job, rank, 0
        self.model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.produced = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def plan(self, step: int) -> Plan:
        """The plan of a step."""
        _, method, strategy = [each for each in self.job["plans"] if each[0] <= step][-1]
        return Plan(method, strategy=strategy, min_elements=0)

    def run(self, one: Synchronizer) -> Iterator[int]:
        """Take all steps that are left, and yield the number of steps after each."""
        while self.step < self.job["steps"]:
            if self.step and any(self.step == step for step, _, _ in self.job["plans"]):
                one.replan(self.plan(self.step))
            self._take_step(one)
            yield self.step

    def _take_step(self, one: Synchronizer) -> None:
        draw = torch.Generator().manual_seed((self.job["seed"] << 32) + (self.rank << 24) + self.step)
        one.begin_step()
        gradients = {}
        for name, value in self.model.items():
            grad = torch.randn(value.shape, generator=draw) + value  # pulls the model to zero
            self.produced[name] += grad.double() / one.world_size
            gradients[name] = grad
        one.submit([GradientSlice(name, grad) for name, grad in gradients.items()])
        one.wait()
        one.commit()
        for name, mean in gradients.items():
            self.applied[name] += mean.double()
            self.model[name] -= 0.1 * mean
        self.step += 1

    def digest(self) -> str:
        """Digest of the model."""
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in self.model.values())).hexdigest()

    def missing(self, one: Synchronizer) -> dict[str, torch.Tensor]:
        """What this rank adds to produced - applied - residuals, whose sum over ranks is zero."""
        found = {name: value - self.applied[name] / one.world_size for name, value in self.produced.items()}
        residuals = one.residuals.state_dict()
        for role in ("local", "aggregate"):
            for name, ranges in residuals[role].items():
                flat = found[name].view(-1)
                for start, values in ranges.items():
                    flat[int(start) : int(start) + values.numel()] -= values.double()
        return found

    def save(self, one: Synchronizer, folder: Path) -> None:
        """Write a checkpoint, and remove old ones."""
        state = {"model": self.model, "produced": self.produced, "applied": self.applied, "sync": one.state_dict()}
        temporary = folder / f"{self.rank}.tmp"
        torch.save(state, temporary)
        temporary.rename(folder / f"{self.rank}.{self.step}.pt")
        for step in steps_saved(folder, self.rank)[:-3]:
            (folder / f"{self.rank}.{step}.pt").unlink()

    def load(self, step: int, folder: Path) -> dict[str, Any]:
        """Read a checkpoint, and return the synchronizer's state."""
        state: dict[str, Any] = torch.load(folder / f"{self.rank}.{step}.pt", weights_only=True)
        self.model, self.produced, self.applied = state["model"], state["produced"], state["applied"]
        self.step = step
        found: dict[str, Any] = state["sync"]
        return found


def steps_saved(folder: Path, rank: int) -> list[int]:
    """Steps of the checkpoints of a rank, in order."""
    return sorted(int(path.name.split(".")[1]) for path in folder.glob(f"{rank}.*.pt"))


def mesh(job: dict[str, Any], folder: str, attempt: int) -> None:
    """A rank that averages gradients, and goes on from the newest checkpoint that all ranks have."""
    rank, world_size = int(os.environ["RANK"]), job["ranks"]
    limit = timedelta(seconds=TIMEOUT)
    port = int(os.environ["MASTER_PORT"]) + attempt
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, rank == 0, timeout=timedelta(seconds=60))
    saved = [0, *steps_saved(Path(folder), rank)]
    store.set(f"newest/{rank}", str(saved[-1]))
    newest = min(int(store.get(f"newest/{other}")) for other in range(world_size))
    state = State(job, rank)
    loaded = state.load(newest, Path(folder)) if newest else None
    specs = {name: TensorSpec(shape) for name, shape in SHAPES.items()}
    one = Synchronizer(
        GroupInfo(rank, world_size, store, "soak"),
        state.plan(max(0, newest - 1)),
        tensors=specs,
        options=SyncOptions(timeout=limit, stall_timeout=4 * limit, seed=job["seed"], nodes=job["nodes"]),
    )
    if loaded is not None:
        one.load_state_dict(loaded)
    say("ready")
    for step in state.run(one):
        say("step", step)
        if step % SAVE_EVERY == 0:
            state.save(one, Path(folder))
    torch.save(state.missing(one), Path(folder) / f"missing.{rank}.pt")
    say("end", state.digest())
    one.close()
    if rank == 0:  # it holds the store
        time.sleep(1.0)


# -- servers -------------------------------------------------------------------------------------------------------


class Pipe:
    """Says what the programs of other tests send through a pipe."""

    def send(self, message: tuple[str, Any]) -> None:
        """Say a message; weights become a digest."""
        kind, value = message
        if kind == "weights":
            kind, value = "end", hashlib.sha256(b"".join(each.tobytes() for each in value.values())).hexdigest()
        say({"port": "ready"}.get(kind, kind), value)


def parameter_server(workers: int, folder: str) -> None:
    """A parameter server that keeps its state."""
    options = ParameterServerOptions(
        workers, host=os.environ["MASTER_ADDR"], port=PORT, state=Path(folder), checkpoint_bytes=20_000,
        timeout=timedelta(seconds=TIMEOUT), patience=timedelta(seconds=60),
    )  # fmt: skip
    processes.run(Pipe(), ParameterServer(options))


def parameter_worker(worker: int, workers: int, steps: int) -> None:
    """A worker of the parameter server."""
    say("ready")
    processes.work(Pipe(), worker, workers, f"{os.environ['MASTER_ADDR']}:{PORT}", steps, timeout=60.0)


def aggregator(workers: int, udp: bool) -> None:
    """An aggregation server."""
    options = AggregationOptions(
        workers, os.environ["MASTER_ADDR"], PORT, udp=udp,
        timeout=timedelta(seconds=TIMEOUT), patience=timedelta(seconds=4 * TIMEOUT),
    )  # fmt: skip
    processes.run(Pipe(), AggregationServer(options))


def aggregator_worker(worker: int, workers: int, steps: int) -> None:
    """A worker that has sums made, and compares each with a model that has no packets."""
    config = jobs.config(workers)
    connection = ConnectionOptions(timeout=timedelta(seconds=60))
    client = AggregationClient((os.environ["MASTER_ADDR"], PORT), config, worker, connection=connection)
    say("ready")
    found = hashlib.sha256()
    for round_ in range(steps):
        outs = [np.empty(stream.size, config.result_dtype(index)) for index, stream in enumerate(config.streams)]
        payloads = [jobs.payload(config, worker, round_, stream) for stream in range(len(outs))]
        for future in [client.submit(round_, stream, *pair) for stream, pair in enumerate(zip(payloads, outs))]:
            future.result(60)
        for out in outs:
            found.update(out.tobytes())
        say("step", round_ + 1)
    client.close()
    say("end", found.hexdigest())


PROGRAMS = {each.__name__: each for each in (mesh, parameter_server, parameter_worker, aggregator, aggregator_worker)}


def main() -> None:
    """Run the program that the command line names."""
    faulthandler.enable()  # says on SIGABRT where each thread is
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
    except GradwireError as error:
        said = {"type": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
        say("error", said | {"at": time.time()})
        raise SystemExit(3) from error
    except BaseException as error:
        say("failed", repr(error))
        raise


if __name__ == "__main__":
    main()
