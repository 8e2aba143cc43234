"""Servers that are stopped before their workers have finished; with signals, in `tests/cli/test_serve.py`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.core.errors import PeerTimeoutError, ServerStoppedError, SyncError
from gradwire.net.server import Server
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions

WHY = "The server was stopped by a test."
SHORT = timedelta(seconds=3)
Wait = Callable[[], object]


@contextmanager
def waiting_for_an_aggregator(fraction: float) -> Iterator[tuple[Server, Wait]]:
    server = AggregationServer(AggregationOptions(3))
    with running(server):
        terms = SessionConfig(3, (), (Stream(Operation.MAXIMUM, 50),), fraction=fraction)
        client = AggregationClient(server.address, terms, 0, connection=gw.ConnectionOptions(timeout=SHORT))
        yield server, client.submit(0, 0, np.ones(50, np.float32), np.empty(50, np.float32)).result
        client.close()


@contextmanager
def waiting_for_parameters(state: Path | None) -> Iterator[tuple[Server, Wait]]:
    server = ParameterServer(ParameterServerOptions(2, state=state))
    model = torch.nn.Linear(4, 3)
    with running(server):
        address = f"127.0.0.1:{server.address[1]}"
        client = gw.ParameterClient(
            model, torch.optim.SGD(model.parameters()), address,
            job=gw.JobOptions(worker=0, workers=2), connection=gw.ConnectionOptions(timeout=SHORT),
        )  # fmt: skip
        model(torch.ones(2, 4)).sum().backward()
        client.step()
        yield server, client.wait
        client.close("over")


@contextmanager
def running(server: Server) -> Iterator[None]:
    def run() -> None:
        with pytest.raises(ServerStoppedError, match=WHY):
            server.run(lambda text: None)
        stopped.set()

    stopped = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(30)
    assert stopped.is_set()


@pytest.fixture(params=["aggregator", "aggregator without stragglers", "parameters", "parameters with state"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Wait, bool]]:
    """A server, a worker's call that waits for it, and whether another server can go on."""
    kind = request.param
    resumable = kind in ("aggregator", "parameters with state")
    made = (
        waiting_for_an_aggregator(1.0 if resumable else 0.6)
        if "aggregator" in kind
        else waiting_for_parameters(tmp_path if resumable else None)
    )
    with made as (server, wait):
        yield server, wait, resumable


def test_a_server_that_is_stopped_for_good_ends_the_job_of_its_workers_at_once(job) -> None:
    server, wait, _ = job
    server.stop(WHY)
    with pytest.raises(SyncError, match=f"has ended: .*{WHY}"):
        wait()


def test_a_server_that_can_be_replaced_is_called_until_the_timeout(job, caplog: pytest.LogCaptureFixture) -> None:
    server, wait, resumable = job
    server.stop(WHY, for_good=False)
    with pytest.raises(SyncError, match=WHY) as caught:
        wait()
    assert isinstance(caught.value, PeerTimeoutError) == resumable
    assert (f"called again for {SHORT.total_seconds():g} s" in caplog.text) == resumable


def aggregate() -> None:
    """A whole job: a server, two workers, one sum."""
    server = AggregationServer(AggregationOptions(2))
    thread = threading.Thread(target=server.run)
    thread.start()
    terms = SessionConfig(2, (), (Stream(Operation.MAXIMUM, 50),))
    clients = [AggregationClient(server.address, terms, rank) for rank in range(2)]
    found = [np.empty(50, np.float32) for _ in clients]
    waits = [client.submit(0, 0, np.ones(50, np.float32), out) for client, out in zip(clients, found, strict=True)]
    for wait, client in zip(waits, clients, strict=True):
        wait.result(60)
        client.close()
    thread.join(60)
    assert not thread.is_alive()
    assert all(out.tolist() == [1.0] * 50 for out in found)


def train(state: Path) -> None:
    """A whole job: a server, one worker, two steps."""
    server = ParameterServer(ParameterServerOptions(1, state=state))
    thread = threading.Thread(target=server.run)
    thread.start()
    model = torch.nn.Linear(4, 3)
    with gw.ParameterClient(
        model, torch.optim.SGD(model.parameters()), f"127.0.0.1:{server.address[1]}",
        job=gw.JobOptions(worker=0, workers=1),
    ) as client:  # fmt: skip
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            client.step()
            client.wait()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=[pytest.mark.ci, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("kind", ["aggregator", "parameters"])
def test_job_after_job_in_one_process_leaves_nothing(kind: str, times: int, tmp_path: Path) -> None:
    found = []
    for turn in range(times + 3):
        aggregate() if kind == "aggregator" else train(tmp_path / str(turn))
        if turn in (2, times + 2):  # the first ones compile, and fill caches
            gc.collect()
            found.append(
                {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}
            )
    assert found[0] == found[1]
