"""Aggregation servers and clients facing silent, malformed, broken or unauthenticated peers."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.packet import SERVER, PacketKey, PacketKind, pack
from gradwire.aggregator.session import NO_EPOCH, AggregatorJoin
from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.net.datagrams import DatagramSocket
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameKind, Header
from tests.aggregator.aggregation_job import SHORT, WAIT, check_round
from tests.net.recorder import until
from tests.net.stranger import Mute, Stranger
from tests.schedules import jobs

PATIENT = ConnectionOptions(timeout=timedelta(seconds=600))


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


@contextlib.contextmanager
def eavesdropping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bytes, Any]]]:
    """The datagrams of workers and server as they were on the wire, each with the address that it was sent to."""
    send, recorded, lock = DatagramSocket.send, [], threading.Lock()

    def record(source: DatagramSocket, packet: np.ndarray, address: Any, sender: Any) -> None:
        class Tap:
            @staticmethod
            def trailer(again: np.ndarray) -> bytes:
                made = sender.trailer(again)
                with lock:
                    recorded.append((packet.tobytes() + made, address))
                return made

        send(source, packet, address, Tap)

    with monkeypatch.context() as patch:
        patch.setattr(DatagramSocket, "send", record)
        yield recorded


def test_replays_get_no_answer_and_change_nothing(job, monkeypatch):
    """Datagrams of workers and server, with their tags, from elsewhere and from the worker's own address."""
    with eavesdropping(monkeypatch) as recorded:
        clients = job.join(job.serve(udp=True), jobs.config())
        draw = random.Random(0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for round_ in range(30):
                check_round(clients, round_)
                for datagram, address in draw.choices(recorded, k=100):  # which come while the next round is under way
                    source = draw.choice((stranger, *(client._datagrams.socket for client in clients)))
                    source.sendto(datagram, address)
            until(lambda: all(end.counters.replayed for end in (job.server, *clients)))
            until(lambda: job.server.counters.forged > 0)  # those from the stranger
            for client in clients:
                client.close()
            assert job.end() is None
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1 << 16)


def test_a_datagram_that_is_replayed_two_thousand_times_costs_the_server_no_byte(job, monkeypatch):
    """It was once answered with 495 times its bytes, each time."""
    with eavesdropping(monkeypatch) as recorded:
        clients = job.join(job.serve(udp=True), jobs.config())
        for round_ in range(3):
            check_round(clients, round_)
        to_server = [datagram for datagram, address in recorded if address == job.server.address]
        num_sent, num_known = job.server.counters.sent, len(recorded)
        worker = clients[0]._datagrams.socket
        for _ in range(200):
            for datagram in to_server[:10]:
                worker.sendto(datagram, job.server.address)
                with contextlib.suppress(BlockingIOError):
                    worker.recv(1 << 16, socket.MSG_DONTWAIT)
        until(lambda: job.server.counters.replayed + job.server.counters.forged >= 500)
        assert job.server.counters.sent == num_sent
        assert len(recorded) == num_known
        assert job.server.counters.replayed > 0
        check_round(clients, 3)


def test_a_worker_cannot_write_as_another_or_as_the_server(job, monkeypatch):
    """Worker 1 has the job key, its own keys, and has seen all datagrams, but not the others' handshakes."""
    clients = job.join(job.serve(udp=True), jobs.config())
    check_round(clients, 0)
    config, server = clients[0].config, job.server
    keys, epoch = clients[1]._sender, clients[1]._worker.epoch
    assert keys is not None
    payload = jobs.payload(config, 2, 1, 0)
    as_worker_0 = pack(PacketKind.DATA, PacketKey(1, 0, 0), 0, epoch, payload)
    refused, forged = server.counters.refused, server.counters.forged
    clients[1]._datagrams.send(as_worker_0, server.address, keys)  # from its own address
    until(lambda: server.counters.refused == refused + 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(as_worker_0.tobytes() + keys.trailer(as_worker_0), server.address)
    until(lambda: server.counters.forged == forged + 1)
    obsolete = pack(PacketKind.OBSOLETE, PacketKey(1, 0, 0), SERVER, epoch)
    clients[1]._datagrams.send(obsolete, clients[0]._datagrams.address, keys)
    until(lambda: clients[0].counters.forged == 1)
    check_round(clients, 1)


def test_datagrams_go_to_the_host_of_the_connection_only(job):
    config = jobs.config(2)
    address = job.serve(workers=2, udp=True)
    join = AggregatorJoin(config, 0, 1, NO_EPOCH, 30.0, ("127.0.0.2", 5000))
    stranger = Stranger(address, 1, 2, (FrameKind.JOIN, join.to_bytes()))
    told = str(stranger.told.get(timeout=WAIT))
    assert "wants datagrams at 127.0.0.2, but is connected from 127.0.0.1" in told
    assert "start the server without --udp" in told
    stranger.endpoint.close()
    check_round(job.join(address, config), 0)


def test_an_address_that_has_sent_nothing_gets_nothing(job):
    """A worker that joins, and says where its datagrams go, has not shown that it receives there."""
    config = replace(jobs.config(2), fraction=0.6, max_misses=8)
    config = replace(config, world_size=2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as victim:
        victim.bind(("127.0.0.1", 0))
        victim.setblocking(False)
        address = job.serve(workers=2, udp=True)
        said = AggregatorJoin(config, 0, 1, NO_EPOCH, 30.0, victim.getsockname())
        stranger = Stranger(address, 1, 2, (FrameKind.JOIN, said.to_bytes()))
        client = AggregationClient(address, config, 0)
        out = np.empty(config.streams[0].size, config.result_dtype(0))
        waiting = client.submit(0, 0, jobs.payload(config, 0, 0, 0), out)
        until(lambda: job.server.counters.taken > 0)
        with pytest.raises(BlockingIOError):
            victim.recv(1 << 16)
        client.close("enough")
        stranger.endpoint.close()
        assert isinstance(waiting.exception(WAIT), SyncError)
        with pytest.raises(BlockingIOError):
            victim.recv(1 << 16)
        job.end()
