"""An aggregation server on a thread, and its clients."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import SessionConfig
from gradwire.net.reconnecting import HEARTBEAT
from gradwire.wire.frame import FrameFlags
from tests.schedules import jobs
from tests.server_processes import run

WAIT = 30.0
SHORT = 4 * HEARTBEAT


class Job:
    """A server on a thread, and clients."""

    def __init__(self) -> None:
        self.clients: list[AggregationClient] = []
        self.servers: list[tuple[AggregationServer, threading.Thread]] = []
        self.ends: list[Any] = []

    def serve(self, on_event: Callable[[str], None] = lambda text: None, **options: Any) -> tuple[str, int]:
        self.server = server = AggregationServer(AggregationOptions(**{"workers": 3, **options}))

        def run() -> None:
            try:
                server.run(on_event)
                self.ends.append(None)
            except Exception as error:
                self.ends.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self.servers.append((server, thread))
        thread.start()
        return server.address

    def join(self, address: tuple[str, int], config: SessionConfig, **options: Any) -> list[AggregationClient]:
        self.clients += [AggregationClient(address, config, rank, **options) for rank in range(config.world_size)]
        return self.clients

    def end(self) -> Any:
        """The error that the server ended with, or None."""
        self.servers[-1][1].join(WAIT)
        return self.ends[-1]


@contextlib.contextmanager
def aggregation_job() -> Iterator[Job]:
    """A job that ends with the `with` block."""
    made = Job()
    yield made
    for client in made.clients:
        client.close()
    for server, thread in made.servers:
        server.stop("The test has ended.")  # it may still wait for workers
        thread.join(WAIT)


def serve_process(pipe: Any, port: int, options: dict[str, Any]) -> None:
    """Run a server in a process of its own; see `tests.server_processes.Process`."""
    run(pipe, AggregationServer(AggregationOptions(port=port, **options)))


def fragments() -> int:
    """Fragments that this network namespace has sent and received."""
    names, values = (line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines()[:2])
    counts = dict(zip(names, map(int, values)))
    return counts["FragCreates"] + counts["ReasmReqds"]


def submit_all(client: AggregationClient, round_: int) -> list[tuple[np.ndarray, Future]]:
    made = []
    for stream, found in enumerate(client.config.streams):
        out = np.empty(found.size, client.config.result_dtype(stream))
        payload = jobs.payload(client.config, client.rank, round_, stream)
        made.append((out, client.submit(round_, stream, payload, out, FrameFlags.USED)))
    return made


def digest(config: SessionConfig, rounds: int) -> str:
    """Digest of the expected results of all rounds, by a model without a network."""
    found = hashlib.sha256()
    for round_ in range(rounds):
        for stream in range(len(config.streams)):
            found.update(jobs.expected(config, round_, stream, slice(None), list(range(config.world_size))).tobytes())
    return found.hexdigest()


def check_round(clients: list[AggregationClient], round_: int) -> None:
    submitted = [submit_all(client, round_) for client in clients]
    for results in submitted:
        for stream, (out, future) in enumerate(results):
            reply = future.result(WAIT)
            workers = np.flatnonzero(reply.counted[0]).tolist()
            assert reply.flags == FrameFlags.USED
            assert out.tobytes() == jobs.expected(clients[0].config, round_, stream, slice(None), workers).tobytes()
