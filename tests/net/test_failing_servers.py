"""A6: a server that always fails ends its clients with one typed error, after bounded tries and bounded time."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest
import torch

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.session import AggregatorWelcome
from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.client import MAX_LOSSES, ConnectionOptions
from gradwire.parameter_server.connection import ServerConnection
from gradwire.parameter_server.session import TrainingJoin, TrainingWelcome
from gradwire.wire.frame import FrameKind
from tests.net.stranger import failing_server
from tests.parameter_server.harness import make_config
from tests.schedules import jobs

TIMEOUT = 1.0
MOST_SECONDS = 15.0  # far more than the timeout, far less than the stall timeout
MOST_CALLS = 30  # pauses between calls grow to half a second
OPTIONS = ConnectionOptions(timeout=timedelta(seconds=TIMEOUT))
CONFIG = make_config(workers=1)
VALUES = {parameter.name: torch.zeros(parameter.shape) for parameter in CONFIG.tensors}


def train(address: tuple[str, int], options: ConnectionOptions = OPTIONS) -> None:
    """Train until the connection fails."""
    connection = ServerConnection(address, TrainingJoin(CONFIG, ({"lr": 0.5},), 1), 0, "gradwire", options, VALUES)
    connection.start()
    try:
        connection.wait_for_values()
        connection.pull(connection.slots[0], torch.zeros(CONFIG.tensors[0].shape), 1)
    finally:
        connection.close()


def aggregate(address: tuple[str, int]) -> None:
    """Wait for a sum until the connection fails."""
    client = AggregationClient(address, jobs.config(1), 0, connection=OPTIONS)
    try:
        client.submit(0, 1, None, np.empty(40, np.float32)).result(MOST_SECONDS)
    finally:
        client.close()


WELCOMES = {
    train: TrainingWelcome(True, (0, 0), (-1, -1), (-1, -1)).to_bytes(),
    aggregate: AggregatorWelcome(5, None, None).to_bytes(),
}


@pytest.mark.timeout(60)
@pytest.mark.ci
@pytest.mark.parametrize("use", WELCOMES)
@pytest.mark.parametrize("how", ["closes", "garbage"])
def test_a_server_that_completes_no_handshake_is_given_up_after_the_timeout(use, how):
    with failing_server(how) as server:
        begun = time.monotonic()
        with pytest.raises(PeerTimeoutError, match=r"gave rank 0 no connection for 1 s \(.+\)"):
            use(server.address)
        assert TIMEOUT <= time.monotonic() - begun < MOST_SECONDS
        assert 1 < server.num_calls <= MOST_CALLS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("use", WELCOMES)
@pytest.mark.parametrize("welcomes", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_server_that_dies_at_each_join_is_given_up_after_bounded_tries(use, welcomes):
    answers = [(FrameKind.WELCOME, WELCOMES[use])] if welcomes else []
    with failing_server("dies", *answers) as server:
        begun = time.monotonic()
        with pytest.raises(SyncError, match=r"gave rank 0 no (result on 1\d connections|connection for 1 s|answer)"):
            use(server.address)
        assert time.monotonic() - begun < MOST_SECONDS
        assert 1 < server.num_calls <= MAX_LOSSES


@pytest.mark.timeout(60)
@pytest.mark.ci
def test_lost_connections_are_not_given_up_before_the_timeout():
    """A server that saves its state for long may lose a worker's connections to an older process of that worker."""
    timeout = 7.0  # the pauses between MAX_LOSSES calls take 4 s
    with failing_server("dies", (FrameKind.WELCOME, WELCOMES[train])) as server:
        begun = time.monotonic()
        with pytest.raises(SyncError, match=r"gave rank 0 no result on \d+ connections, one after another"):
            train(server.address, ConnectionOptions(timeout=timedelta(seconds=timeout)))
        assert timeout <= time.monotonic() - begun < MOST_SECONDS
        assert server.num_calls > MAX_LOSSES
