"""Interpreters that end: who has left is missed where something is needed from it, then at once, and nowhere else."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.core.errors import SyncError
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from tests.aggregator.aggregation_job import submit_all
from tests.integration.jobs.exits import SIGNALS, STEPS
from tests.integration.launch import ROOT, free_port
from tests.parameter_server.clients import linear, sgd, train_step
from tests.schedules import jobs

pytestmark = pytest.mark.timeout(400)
PATIENCE = 180.0  # seconds; on a busy machine, two interpreters that import torch may need most of it
LEFT = "Rank 1 has left the group"
DIED = "has ended without a goodbye"
GAVE_UP = "Rank 1 gave up: its interpreter exits in the middle of a step"


@contextlib.contextmanager
def two_ranks(job: str, *words: str, **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of a module of `tests.integration.jobs`, which are killed at the end."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **env}
    command = [sys.executable, "-m", f"tests.integration.jobs.{job}", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            process = subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(rank)}, **pipes)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


@pytest.mark.parametrize(
    ("how", "step", "kind", "said"),
    [
        ("exception", STEPS + 1, "PeerLostError", LEFT),
        pytest.param("interrupt", STEPS + 1, "PeerLostError", LEFT, marks=pytest.mark.ci),
        pytest.param("kill", STEPS + 1, "PeerLostError", DIED, marks=pytest.mark.ci),
        pytest.param("exception in a step", STEPS, "PeerFailedError", GAVE_UP, marks=pytest.mark.ci),
        pytest.param("interrupt in a step", STEPS, "PeerFailedError", GAVE_UP, marks=pytest.mark.ci),
        pytest.param("terminate in a step", STEPS + 1, "PeerLostError", DIED, marks=pytest.mark.ci),
    ],
)
def test_a_step_outlives_who_has_left_after_it_and_the_next_one_names_it(
    tmp_path: Path, how: str, step: int, kind: str, said: str
) -> None:
    with two_ranks("exits", how, GRADWIRE_DUMP_DIR=str(tmp_path)) as (stays, leaves):
        _, log = leaves.communicate(timeout=PATIENCE)
        assert leaves.returncode == -SIGNALS.get(how.partition(" ")[0], -1), log
        out, log = stays.communicate("it is gone\n", timeout=PATIENCE)
    assert stays.returncode == 0, log
    found = json.loads(out)
    assert (found["step"], found["type"], found["rank"]) == (step, kind, 1), found["message"]
    assert said in found["message"]
    assert found["seconds"] < 15, "no timeout of 30 s, no stall timeout"


@pytest.mark.ci
def test_a_rank_that_waits_for_another_can_be_interrupted() -> None:
    with two_ranks("late") as (waits, late):
        for process in (waits, late):
            assert process.stdout.readline() == "both are here\n"
        time.sleep(3)
        assert waits.poll() is None, waits.communicate(timeout=PATIENCE)
        begun = time.monotonic()
        waits.send_signal(signal.SIGINT)
        _, log = waits.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < 60, "its timeout is 10 minutes"
        assert log.rstrip().endswith("KeyboardInterrupt"), log
        assert "attach(ddp" in log


def work(layer: str, address: tuple[str, int]) -> None:
    """Be worker 1, as long as the job goes on."""
    name, port = address
    if layer == "aggregator":
        with contextlib.closing(AggregationClient(address, jobs.config(2), 1)) as client:
            for round_ in itertools.count():
                for _, future in submit_all(client, round_):
                    future.result(PATIENCE)
    model, job = linear(), gw.JobOptions(worker=1, workers=2)
    transfer = gw.TransferOptions(min_elements=0)
    with gw.ParameterClient(model, sgd(model), f"{name}:{port}", job=job, transfer=transfer) as client:
        while train_step(client, client.steps):
            client.wait()


@pytest.mark.parametrize("layer", ["parameter_server", pytest.param("aggregator", marks=pytest.mark.ci)])
def test_a_worker_whose_interpreter_ends_with_work_in_flight_is_named(layer: str) -> None:
    """It ends at once, and in good order; the other worker hears of it after the server's patience."""
    options = {"patience": timedelta(seconds=1)}
    server = (
        AggregationServer(AggregationOptions(2, **options))
        if layer == "aggregator"
        else ParameterServer(ParameterServerOptions(2, **options))
    )
    command = [sys.executable, "-m", "tests.integration.jobs.unfinished", layer, str(server.address[1])]
    with ThreadPoolExecutor() as pool, subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as ends:
        served, worked = pool.submit(server.run), pool.submit(work, layer, server.address)
        assert ends.communicate(timeout=PATIENCE) == (None, "")
        assert ends.returncode == 0
        for future in (worked, served):
            with pytest.raises(SyncError, match=r"Workers \[0\] were away for 1 s"):
                future.result(PATIENCE)
