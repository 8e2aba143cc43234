"""Aggregation servers and clients facing silent, malformed, broken or unauthenticated peers."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.session import NO_EPOCH, AggregatorJoin
from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.net.datagrams import DatagramSocket
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameKind, Header
from tests.aggregator.aggregation_job import SHORT, WAIT, Job, aggregation_job, check_round
from tests.net.stranger import Mute, Stranger
from tests.schedules import jobs

PATIENT = ConnectionOptions(timeout=timedelta(seconds=600))


@pytest.fixture
def job() -> Iterator[Job]:
    with aggregation_job() as made:
        yield made


@pytest.mark.timeout(30)
def test_a_multicast_group_that_a_worker_cannot_join_is_reported_at_once(job):
    group = ("239.71.87.3", 0x6757)
    address = job.serve(workers=1, udp=True, multicast=group)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(group)
        with pytest.raises(SyncError, match=r"multicast group 239\.71\.87\.3:26455: .* without --multicast"):
            AggregationClient(address, jobs.config(1), 0, connection=PATIENT)
    assert "multicast group" in str(job.end())


@contextlib.contextmanager
def answering(words: bytes | None) -> Iterator[tuple[str, int]]:
    """A server with this one answer to a join message, or with none."""
    listener = socket.create_server(("127.0.0.1", 0))
    member = GroupMember("gradwire", 1, 2, job_epoch("gradwire"))
    key, callers, owner = job_key("127.0.0.1", "gradwire"), frozenset([0]), Mute()
    hub = ReconnectingEndpoint(member, key, owner, timeout=10 * SHORT, listener=listener, callers=callers)
    if words is not None:
        header, body = Header(FrameKind.WELCOME, sender=1, epoch=member.epoch), np.frombuffer(words, np.uint8)
        owner.joined = lambda peer: hub.send(peer, header, body)
    hub.start()
    yield listener.getsockname()
    hub.close()


@pytest.mark.timeout(30)
def test_a_silent_server():
    with answering(None) as address, pytest.raises(PeerTimeoutError, match="no answer for 1 s"):
        AggregationClient(address, jobs.config(1), 0, connection=ConnectionOptions(timeout=SHORT))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", [b"", b"{}", b'{"epoch": 0, "port": null, "group": null}'])
def test_a_malformed_welcome(words):
    with answering(words) as address, pytest.raises(SyncError, match=r"an answer that this worker cannot read: Not "):
        AggregationClient(address, jobs.config(1), 0, connection=PATIENT)


@pytest.mark.timeout(30)
def test_an_exception_on_a_clients_thread_fails_pending_futures(job):
    client = job.join(job.serve(workers=1, udp=True), jobs.config(1))[0]
    out = np.empty(40, np.float32)
    out.flags.writeable = False  # so that its result cannot be taken
    with pytest.raises(SyncError, match="read-only") as caught:
        client.submit(0, 1, np.zeros(40, np.float32), out).result()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(SyncError, match="read-only"):
        client.submit(0, 2, None, np.empty(130, np.uint8))
    assert "read-only" in str(job.end())


@pytest.mark.timeout(30)
def test_an_exception_on_a_servers_thread_reaches_all_workers(job):
    def print_to_nobody(text: str) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(SyncError, match="nobody reads"):
        AggregationClient(job.serve(workers=1, on_event=print_to_nobody), jobs.config(1), 0)
    assert "nobody reads" in str(job.end())


@pytest.mark.timeout(30)
def test_an_invalid_port_is_reported_at_once():
    with pytest.raises(SyncError, match="port must be 0-65535"):
        AggregationClient(("127.0.0.1", 99_999), jobs.config(1), 0, connection=PATIENT)


@pytest.mark.parametrize("udp", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"stall_seconds": 10**400}, {"address": ["a\0", 5]}, {"address": ["a.example", 5]}, {"config": [[]]}]
)
def test_a_malformed_join_only_closes_its_senders_connection(job, wrong, udp):
    config = jobs.config(2)
    address = job.serve(workers=2, udp=udp)
    said = json.loads(AggregatorJoin(config, 0, 1, NO_EPOCH, 30.0, ("127.0.0.1", 5000)).to_bytes())
    stranger = Stranger(address, 1, 2, (FrameKind.JOIN, json.dumps({**said, **wrong}).encode()))
    assert re.search(
        "Not a worker.s join message|session configuration is invalid", str(stranger.told.get(timeout=WAIT))
    )
    stranger.endpoint.close()
    clients = job.join(address, config)
    for round_ in range(2):
        check_round(clients, round_)


def test_unauthenticated_peers_and_garbage_change_nothing(job):
    """Ten thousand unauthenticated datagrams while sums are formed."""
    config = jobs.config()
    address = job.serve(udp=True)
    clients = job.join(address, config)
    draw, done = random.Random(0), threading.Event()

    def flood() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            for _ in range(10_000):
                with contextlib.suppress(BlockingIOError):
                    stranger.sendto(draw.randbytes(draw.choice((0, 16, 60, 1400))), address)
            with contextlib.suppress(BlockingIOError):
                assert stranger.recv(1 << 16) == b"", "a stranger was answered"
        done.set()

    flooding = threading.Thread(target=flood)
    flooding.start()
    round_ = 0
    while not done.is_set() or round_ < 5:
        check_round(clients, round_)
        round_ += 1
    flooding.join()


def test_replays_of_a_session_change_no_sum_and_do_not_end_the_job(job, monkeypatch):
    """An attacker repeats datagrams of workers and server, with their tags, to the same receivers."""
    send, recorded, lock = DatagramSocket.send, [], threading.Lock()
    tap = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    tap.bind(("127.0.0.1", 0))

    def record(source: DatagramSocket, packet: np.ndarray, addresses: Any) -> None:
        addresses = list(addresses)
        with lock:
            send(source, packet, [tap.getsockname()])
            datagram = tap.recv(1 << 16)
        recorded.extend((datagram, address) for address in addresses)
        send(source, packet, addresses)

    monkeypatch.setattr(DatagramSocket, "send", record)
    clients = job.join(job.serve(udp=True), jobs.config())
    draw, num_replayed = random.Random(0), {}
    with tap, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as eavesdropper:
        for round_ in range(30):
            check_round(clients, round_)
            for datagram, address in draw.choices(recorded, k=100):  # which come while the next round is under way
                eavesdropper.sendto(datagram, address)
                num_replayed[address] = num_replayed.get(address, 0) + 1
        for client in clients:
            client.close()
        assert job.end() is None
        eavesdropper.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing came back to it
            eavesdropper.recv(1 << 16)
    assert num_replayed.keys() == {job.server.address, *(client._datagrams.address for client in clients)}
    for end in (job.server, *clients):
        assert end.counters.received + end.counters.forged > end.counters.taken, "the replays came"
