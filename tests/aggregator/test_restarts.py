"""Connections that break, and processes that are killed or stopped."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.aggregator.client import AggregationClient
from gradwire.core.errors import SyncError
from tests.aggregator.aggregation_job import SHORT, WAIT, check_round, serve_process, submit_all
from tests.aggregator.lost_results import lose_results_and_server
from tests.schedules import jobs
from tests.server_processes import Process


class Relay:
    """A connection to a server that can be cut."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.holds = False  # whether new connections are closed at once
        self.address = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                accepted = self._listener.accept()[0]
                if self.holds:
                    accepted.close()
                    continue
                try:
                    pair = accepted, socket.create_connection(self._to)
                except ConnectionError:  # there is no server now
                    accepted.close()
                    continue
                self._ends += pair
                for way in (pair, pair[::-1]):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_reconnects_before_all_have_joined_is_waited_for(job):
    patience = 2.0
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    address = job.serve(workers=2, patience=timedelta(seconds=patience), on_event=events.put)
    relay = Relay(address)
    job.clients.append(AggregationClient(relay.address, jobs.config(2), 0))
    threading.Event().wait(1.2 * patience)  # the other has not come for longer than a lost worker is waited for
    relay.cut()
    heard = []
    while heard[-1:] != ["Worker 0: joined"] or len(heard) < 3:
        heard.append(events.get(timeout=WAIT))
    job.clients.append(AggregationClient(address, jobs.config(2), 1))
    check_round(job.clients, 0)
    relay.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.ci), signal.SIGTERM])
@pytest.mark.parametrize("udp", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_restarting_a_killed_or_stopped_server_changes_no_result(job, udp, number):
    options = {"workers": 2, "udp": udp}
    first = Process(serve_process, 0, options)
    port = first.hear("port")
    clients = job.join(("127.0.0.1", port), jobs.config(2))
    check_round(clients, 0)
    half = submit_all(clients[0], 1)  # of a round that the other has not begun
    first.signal(number)
    first.process.join()
    first.end()
    second = Process(serve_process, port, options)
    assert second.hear("port") == port
    rest = submit_all(clients[1], 1)
    for results in (half, rest):
        for stream, (out, future) in enumerate(results):
            counted = np.flatnonzero(future.result(WAIT).counted[0]).tolist()
            assert out.tobytes() == jobs.expected(clients[0].config, 1, stream, slice(None), counted).tobytes()
    check_round(clients, 2)
    for client in clients:
        client.close()
    assert second.hear("ended") == ""
    second.end()


def test_a_result_that_only_one_worker_has_is_made_again_after_a_restart_whoever_rejoins_first(job):
    """The server asks for that worker's contribution when it is not there to hear it."""
    options = {"workers": 2}
    first = Process(serve_process, 0, options)
    port = first.hear("port")
    relays = [Relay(("127.0.0.1", port)) for _ in range(2)]
    job.clients += [AggregationClient(relay.address, jobs.config(2), rank) for rank, relay in enumerate(relays)]
    check_round(job.clients, 0)
    waiting = submit_all(job.clients[1], 1)
    threading.Event().wait(0.5)  # they arrive
    relays[1].holds = True
    relays[1].cut()
    for _, future in submit_all(job.clients[0], 1):
        future.result(WAIT)  # which the other has not heard
    relays[0].holds = True
    first.signal(signal.SIGKILL)
    first.process.join()
    first.end()
    second = Process(serve_process, port, options)
    assert second.hear("port") == port
    relays[1].holds = False
    threading.Event().wait(3.0)  # it rejoins, and sends what was not answered
    relays[0].holds = False
    for stream, (out, future) in enumerate(waiting):
        counted = np.flatnonzero(future.result(WAIT).counted[0]).tolist()
        assert out.tobytes() == jobs.expected(job.clients[0].config, 1, stream, slice(None), counted).tobytes()
    check_round(job.clients, 2)
    for client in job.clients:
        client.close()
    assert second.hear("ended") == ""
    second.end()
    for relay in relays:
        relay.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_has_all_results_is_asked_over_udp_for_what_another_lacks(job, first):
    """It sends no datagram of its own, so the server does not know where its datagrams go."""
    options = {"workers": 2, "udp": True}
    servers = [Process(serve_process, 0, options)]
    port = servers[0].hear("port")

    def restart() -> None:
        servers[0].end()
        servers.append(Process(serve_process, port, options))
        assert servers[1].hear("port") == port

    clients = job.join(("127.0.0.1", port), jobs.config(2))
    check_round(clients, 0)
    lacking = lose_results_and_server(clients, 1, first, restart)
    for stream, (out, future) in enumerate(lacking):
        future.result(WAIT)
        assert out.tobytes() == jobs.expected(clients[0].config, 1, stream, slice(None), [0, 1]).tobytes()
    check_round(clients, 2)
    for client in clients:
        client.close()
    assert servers[1].hear("ended") == ""
    servers[1].end()


@pytest.mark.parametrize("first", ["the latest start", "an older start"])
def test_a_worker_of_an_older_start_does_not_end_the_job_after_a_restart_whoever_rejoins_first(job, first):
    server = Process(serve_process, 0, {"workers": 2})
    address = ("127.0.0.1", server.hear("port"))
    slow, relay = Relay(address), Relay(address)
    old = [AggregationClient(way, jobs.config(2), rank, session=5) for rank, way in enumerate((address, slow.address))]
    job.clients += old
    check_round(old, 0)
    slow.holds = True  # the older start's worker 1 is held up, and comes back after the restart
    slow.cut()
    old[0].close()
    new = [AggregationClient(relay.address, jobs.config(2), rank, session=4) for rank in range(2)]
    job.clients += new
    check_round(new, 0)
    relay.holds = first == "an older start"
    server.signal(signal.SIGKILL)
    server.process.join()
    server.end()
    joined: queue.SimpleQueue[str] = queue.SimpleQueue()
    job.serve(workers=2, port=address[1], on_event=joined.put)
    if first == "an older start":
        slow.holds = False
        assert joined.get(timeout=WAIT) == "Worker 1: joined"
        relay.holds = False
        check_round(new, 1)
    else:
        check_round(new, 1)
        slow.holds = False
    with pytest.raises(SyncError, match="has been started again since"):
        submit_all(old[1], 1)[0][1].result(WAIT)
    check_round(new, 2)
    slow.close()
    relay.close()


def work_process(pipe: Any, port: int) -> None:
    client = AggregationClient(("127.0.0.1", port), jobs.config(2), 1)
    pipe.send(("pid", os.getpid()))
    try:
        work(client, range(1 << 30))
    except SyncError as error:
        pipe.send(("error", str(error)))


def work(client: AggregationClient, rounds: range) -> None:
    for round_ in rounds:
        for _, future in submit_all(client, round_):
            future.result(WAIT)


def test_a_worker_that_is_frozen_counts_as_dead_and_ends_with_an_error_when_it_goes_on(job):
    address = job.serve(workers=2, timeout=SHORT, patience=timedelta(seconds=1))
    worker = Process(work_process, address[1])
    client = AggregationClient(address, jobs.config(2), 0)
    job.clients.append(client)
    worker.hear("pid")
    work(client, range(10))
    worker.signal(signal.SIGSTOP)
    with pytest.raises(SyncError, match=r"Workers \[1\] were away for 1 s"):
        work(client, range(10, 1 << 30))
    assert job.end().rank == 1
    worker.signal(signal.SIGCONT)
    assert "got no sign of life from rank 1" in worker.hear("error")
    worker.end()


def test_a_killed_worker_ends_the_job_with_an_error_that_names_it(job):
    address = job.serve(workers=2, patience=timedelta(seconds=0.5))
    worker = Process(work_process, address[1])
    client = AggregationClient(address, jobs.config(2), 0)
    job.clients.append(client)
    worker.hear("pid")
    work(client, range(10))
    worker.signal(signal.SIGKILL)
    with pytest.raises(SyncError, match=r"Workers \[1\] were away for 0.5 s"):
        work(client, range(10, 1 << 30))
    worker.end()
    assert job.end().rank == 1
