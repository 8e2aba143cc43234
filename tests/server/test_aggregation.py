"""The aggregation server over real sockets: sums, faults, ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import DisagreementError, OptionError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.protocol.aggregation.joining import Join
from gradwire.protocol.aggregation.terms import Operation, Stream, Terms
from gradwire.protocol.aggregation.worker import NO_EPOCH
from gradwire.protocol.handshake import JobKey, Member
from gradwire.server.aggregation import AggregationOptions, AggregationServer
from gradwire.server.stopping import stopped_by_signals
from gradwire.transport.aggregation import AggregationClient
from gradwire.transport.datagrams import DatagramSocket
from gradwire.transport.hub import HEARTBEAT, Hub
from gradwire.transport.keys import job_epoch, job_key
from gradwire.wire.frame import FrameFlags, FrameKind, Header
from tests.schedules import jobs
from tests.server.processes import Process
from tests.transport.recorder import until

WAIT = 30.0
SHORT = 4 * HEARTBEAT


class Job:
    """A server on a thread, and clients."""

    def __init__(self) -> None:
        self.clients: list[AggregationClient] = []
        self.servers: list[threading.Thread] = []
        self.ends: list[Any] = []

    def serve(self, on_event: Callable[[str], None] = lambda text: None, **options: Any) -> tuple[str, int]:
        self.server = server = AggregationServer(AggregationOptions(**{"workers": 3, **options}))

        def run() -> None:
            try:
                server.run(on_event)
                self.ends.append(None)
            except Exception as error:
                self.ends.append(error)

        self.servers.append(threading.Thread(target=run, daemon=True))
        self.servers[-1].start()
        return server.address

    def join(self, address: tuple[str, int], terms: Terms, **options: Any) -> list[AggregationClient]:
        self.clients += [AggregationClient(address, terms, rank, **options) for rank in range(terms.world_size)]
        return self.clients

    def end(self) -> Any:
        """What the server ended with."""
        self.servers[-1].join(WAIT)
        return self.ends[-1]


@pytest.fixture
def job():
    made = Job()
    yield made
    for client in made.clients:
        client.close()
    for server in made.servers:
        server.join(WAIT)


def submit_all(client: AggregationClient, round_: int) -> list[tuple[np.ndarray, Future]]:
    made = []
    for stream, found in enumerate(client.terms.streams):
        out = np.empty(found.size, client.terms.lanes(stream))
        payload = jobs.payload(client.terms, client.rank, round_, stream)
        made.append((out, client.submit(round_, stream, payload, out, FrameFlags.USED)))
    return made


def check_round(clients: list[AggregationClient], round_: int) -> None:
    submitted = [submit_all(client, round_) for client in clients]
    for results in submitted:
        for stream, (out, future) in enumerate(results):
            reply = future.result(WAIT)
            workers = np.flatnonzero(reply.counted[0]).tolist()
            assert reply.flags == FrameFlags.USED
            assert out.tobytes() == jobs.expected(clients[0].terms, round_, stream, slice(None), workers).tobytes()


@pytest.mark.parametrize("options", [{}, {"udp": True}, {"udp": True, "drop": 0.1}], ids=["tcp", "udp", "lossy"])
def test_sums_over_sockets(job, options):
    terms = jobs.terms()
    clients = job.join(job.serve(**options), terms)
    for round_ in range(5):
        check_round(clients, round_)
    for client in clients:
        client.close()
    assert job.end() is None


def test_results_may_be_multicast(job):
    group = ("239.71.87.1", 0x6757)
    stranger = DatagramSocket(group, JobKey(bytes(32)), shared=True)
    stranger.join(group[0], "127.0.0.1")
    clients = job.join(job.serve(udp=True, multicast=group), jobs.terms())
    for round_ in range(3):
        check_round(clients, round_)
    assert list(stranger.receive(64)) == []  # without the job's key nothing counts
    assert stranger.forged == 3 * 5  # rounds times packets: one for all workers
    stranger.close()


@pytest.mark.parametrize("udp", [False, True])
def test_a_name_of_this_machine_is_one_address_for_connection_and_datagrams(job, monkeypatch, udp):
    """Also where the system knows localhost as ::1 first, and the server listens at 127.0.0.1."""
    look_up = socket.getaddrinfo

    def ipv6_first(host: Any, port: Any, family: int = 0, *rest: Any, **options: Any) -> list[Any]:
        found = look_up(host, port, family, *rest, **options)
        if host == "localhost" and family == socket.AF_UNSPEC:
            return [(socket.AF_INET6, *found[0][1:4], ("::1", port or 0, 0, 0)), *found]
        return found

    monkeypatch.setattr(socket, "getaddrinfo", ipv6_first)
    _, port = job.serve(udp=udp)
    check_round(job.join(("localhost", port), jobs.terms()), 0)


@pytest.mark.timeout(30)
def test_a_group_that_a_worker_cannot_join_is_told_at_once(job):
    group = ("239.71.87.3", 0x6757)
    address = job.serve(workers=1, udp=True, multicast=group)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(group)
        with pytest.raises(SyncError, match=r"multicast group 239\.71\.87\.3:26455: .* without --multicast"):
            AggregationClient(address, jobs.terms(1), 0, timeout=timedelta(seconds=600))
    assert "multicast group" in str(job.end())


def test_small_buffers_and_many_workers(job):
    terms = jobs.terms(16)
    address = job.serve(workers=16, udp=True, buffer_bytes=4096)
    check_round(job.join(address, terms), 0)


def test_counters_are_what_happened_to_datagrams(job, caplog):
    """All that workers have sent has come, was dropped or, had it been damaged, does not carry the tag."""
    address = job.serve(udp=True, drop=0.1)
    clients = job.join(address, jobs.terms())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in (0, 10, 100):
            stranger.sendto(bytes(size), address)
            stranger.sendto(bytes(size), clients[0]._datagrams.address)
    for round_ in range(30):
        check_round(clients, round_)
    until(lambda: clients[0].counters.forged == job.server.counters.forged == 3)
    sent = sum(client.counters.sent for client in clients)
    until(lambda: job.server.counters.received + job.server.counters.dropped == sent)
    with caplog.at_level("INFO", "gradwire"):
        for client in clients:
            client.close()
    assert job.end() is None
    server, workers = job.server.counters, [client.counters for client in clients]
    assert server.dropped > 0
    assert sum(each.sent_again for each in workers) >= server.dropped // 2
    assert server.received + server.dropped == sent == sum(each.sent for each in workers)
    assert [each.forged for each in workers] == [3, 0, 0]
    for rank, each in enumerate(workers):
        assert f"Aggregation at rank {rank}: packets: {each}" in caplog.text


# -- ends ---------------------------------------------------------------------------------------------------


def test_workers_that_expect_different_things_are_told_so(job):
    address = job.serve(workers=2)
    first = AggregationClient(address, jobs.terms(2), 0)
    job.clients.append(first)
    with pytest.raises(SyncError, match="run one model, plan and version"):
        job.clients.append(AggregationClient(address, jobs.terms(2, max_misses=3), 1))
    assert isinstance(job.end(), DisagreementError)
    with pytest.raises(SyncError, match="run one model, plan and version"):
        first.submit(0, 1, None, np.empty(40, np.float32)).result(WAIT)


def test_packets_that_fit_no_datagram_are_refused_with_advice(job):
    terms = Terms(1, (jobs.WIDE,), (Stream(Operation.SUM, 100_000),), packet_elements=65_536)
    with pytest.raises(SyncError, match="packet_elements=31744 or less") as caught:
        AggregationClient(job.serve(workers=1, udp=True), terms, 0)
    fitting = Terms(1, (jobs.WIDE,), (Stream(Operation.SUM, 100_000),), packet_elements=31_744)
    assert "datagram" in str(caught.value)
    job.join(job.serve(workers=1, udp=True), fitting)


def test_packets_that_were_made_of_whole_blocks_are_refused_with_advice_on_the_block(job):
    streams = (Stream(Operation.SUM, 100_000),)
    terms = Terms(2, (jobs.WIDE,), streams, packet_elements=65_536)
    with pytest.raises(SyncError, match="packet_elements=31744 or less, or start the server without --udp"):
        AggregationClient(job.serve(workers=2, udp=True), terms, 0)
    partial = Terms(3, (jobs.WIDE,), streams, packet_elements=65_536, fraction=0.6)
    with pytest.raises(SyncError, match="31744 or less, with a compressor whose block is no longer, or start"):
        AggregationClient(job.serve(workers=3, udp=True), partial, 0)


def test_a_worker_that_gives_up_ends_the_job_of_all(job):
    clients = job.join(job.serve(), jobs.terms())
    waiting = submit_all(clients[0], 0)
    clients[1].close("its disk is full")
    with pytest.raises(SyncError, match="its disk is full"):
        waiting[0][1].result(WAIT)
    assert "its disk is full" in str(job.end())


def test_a_worker_that_finishes_first_ends_the_job_of_all(job):
    clients = job.join(job.serve(), jobs.terms())
    waiting = submit_all(clients[0], 0)
    clients[2].close()
    with pytest.raises(SyncError, match=r"\[2\] have finished"):
        waiting[0][1].result(WAIT)
    assert isinstance(job.end(), PeerLostError)


@pytest.mark.parametrize("udp", [False, True])
def test_a_worker_that_holds_up_a_result_is_named(job, udp):
    clients = job.join(job.serve(udp=udp), jobs.terms(), stall_timeout=timedelta(seconds=0.3))
    waiting = [submit_all(client, 0) for client in clients[:2]]
    for results in waiting:
        with pytest.raises(SyncError, match=r"from workers \[2\] within 0.3 s"):
            results[0][1].result(WAIT)
    error = job.end()
    assert isinstance(error, PeerTimeoutError)
    assert error.rank == 2


def test_a_server_that_is_not_there(job):
    address = job.serve(workers=1)
    job.join(address, jobs.terms(1))[0].close()
    job.end()
    with pytest.raises(PeerTimeoutError, match="no connection for 1 s"):
        AggregationClient(address, jobs.terms(1), 0, timeout=SHORT)


@contextlib.contextmanager
def answering(words: bytes | None) -> Iterator[tuple[str, int]]:
    """A server with this one answer to a worker's first words, or with none."""
    listener = socket.create_server(("127.0.0.1", 0))
    member = Member("gradwire", 1, 2, job_epoch("gradwire"))
    key, callers, owner = job_key("127.0.0.1", "gradwire"), frozenset([0]), Mute()
    hub = Hub(member, key, owner, timeout=10 * SHORT, listener=listener, callers=callers)
    if words is not None:
        header, body = Header(FrameKind.WELCOME, sender=1, epoch=member.epoch), np.frombuffer(words, np.uint8)
        owner.joined = lambda peer: hub.send(peer, header, body)
    hub.start()
    yield listener.getsockname()
    hub.close()


@pytest.mark.timeout(30)
def test_a_server_that_is_there_and_says_nothing():
    with answering(None) as address, pytest.raises(PeerTimeoutError, match="no answer for 1 s"):
        AggregationClient(address, jobs.terms(1), 0, timeout=SHORT)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", [b"", b"{}", b'{"epoch": 0, "port": null, "group": null}'])
def test_a_server_whose_answer_cannot_be_read(words):
    with answering(words) as address, pytest.raises(SyncError, match="cannot read: Expected"):
        AggregationClient(address, jobs.terms(1), 0, timeout=timedelta(seconds=600))


class Mute:
    """Lets everybody in, takes everything, and says nothing."""

    def admit(self, peer: int, header: Header) -> None:
        """Whatever it is."""

    def joined(self, peer: int) -> None:
        """Nothing to say."""

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Nothing to do."""

    def left(self, peer: int, error: SyncError | None) -> None:
        """Nobody to tell."""


@pytest.mark.timeout(30)
def test_what_goes_wrong_on_a_clients_thread_is_told_to_whoever_waits(job):
    client = job.join(job.serve(workers=1, udp=True), jobs.terms(1))[0]
    out = np.empty(40, np.float32)
    out.flags.writeable = False  # so that its result cannot be taken
    with pytest.raises(SyncError, match="read-only") as caught:
        client.submit(0, 1, np.zeros(40, np.float32), out).result()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(SyncError, match="read-only"):
        client.submit(0, 2, None, np.empty(130, np.uint8))
    assert "read-only" in str(job.end())


@pytest.mark.timeout(30)
def test_what_goes_wrong_on_a_servers_thread_is_told_to_all(job):
    def print_to_nobody(text: str) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(SyncError, match="nobody reads"):
        AggregationClient(job.serve(workers=1, on_event=print_to_nobody), jobs.terms(1), 0)
    assert "nobody reads" in str(job.end())


@pytest.mark.timeout(30)
def test_an_address_that_cannot_be_called_is_told_at_once():
    with pytest.raises(SyncError, match="port must be 0-65535"):
        AggregationClient(("127.0.0.1", 99_999), jobs.terms(1), 0, timeout=timedelta(seconds=600))


def test_an_older_session_is_fenced(job):
    address = job.serve(workers=2, udp=True)
    terms = jobs.terms(2)
    old = job.join(address, terms, session=5)
    check_round(old, 0)
    waiting = submit_all(old[0], 1)
    new = [AggregationClient(address, terms, rank, session=6) for rank in range(2)]
    job.clients += new
    with pytest.raises(SyncError, match="started again"):
        waiting[0][1].result(WAIT)
    check_round(new, 0)
    with pytest.raises(SyncError, match="Expected session 6"):
        AggregationClient(address, terms, 0, session=5)
    check_round(new, 1)


class Stranger(Mute):
    """Holds the job's key, and says one thing when it is connected."""

    def __init__(self, address: tuple[str, int], rank: int, workers: int, words: bytes) -> None:
        self.words = words
        self.told: queue.SimpleQueue[SyncError | None] = queue.SimpleQueue()
        self._member = Member("gradwire", rank, workers + 1, job_epoch("gradwire"))
        self.hub = Hub(
            self._member, job_key(address[0], "gradwire"), self, timeout=SHORT, call=(workers, address)
        )  # fmt: skip
        self.hub.start()

    def joined(self, peer: int) -> None:
        header = Header(FrameKind.JOIN, sender=self._member.rank, epoch=self._member.epoch)
        self.hub.send(peer, header, np.frombuffer(self.words, np.uint8))

    def left(self, peer: int, error: SyncError | None) -> None:
        self.told.put(error)


@pytest.mark.parametrize("udp", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"stall_seconds": 10**400}, {"address": ["a\0", 5]}, {"address": ["a.example", 5]}, {"terms": [[]]}]
)
def test_malformed_first_words_cost_their_sender_alone_the_connection(job, wrong, udp):
    terms = jobs.terms(2)
    address = job.serve(workers=2, udp=udp)
    said = json.loads(Join(terms, 0, 1, NO_EPOCH, 30.0, ("127.0.0.1", 5000)).to_bytes())
    stranger = Stranger(address, 1, 2, json.dumps({**said, **wrong}).encode())
    assert re.search("a worker's first words|terms of an aggregation server", str(stranger.told.get(timeout=WAIT)))
    stranger.hub.close()
    clients = job.join(address, terms)
    for round_ in range(2):
        check_round(clients, round_)


def test_what_does_not_fit_the_terms_is_refused_at_once(job):
    terms = jobs.terms(1)
    client = job.join(job.serve(workers=1), terms)[0]
    out = np.empty(40, np.float32)
    with pytest.raises(ValueError, match="a stream below 3"):
        client.submit(0, 3, None, out)
    with pytest.raises(ValueError, match="float32 of 40 elements"):
        client.submit(0, 1, None, np.empty(41, np.float32))
    with pytest.raises(ValueError, match="160 bytes of stream 1"):
        client.submit(0, 1, np.zeros(39, np.float32), out)
    client.submit(3, 1, np.zeros(40, np.float32), out).result(WAIT)
    with pytest.raises(ValueError, match="one after another"):
        client.submit(3, 1, np.zeros(40, np.float32), out)


def test_it_wants_a_key_beyond_loopback_and_datagrams_for_multicast(monkeypatch):
    monkeypatch.delenv("GRADWIRE_JOB_KEY", raising=False)
    monkeypatch.delenv("GRADWIRE_JOB_KEY_FILE", raising=False)
    with pytest.raises(OptionError, match="GRADWIRE_JOB_KEY_FILE"):
        AggregationServer(AggregationOptions(1, host="0.0.0.0"))
    with pytest.raises(OptionError, match="udp=True"):
        AggregationServer(AggregationOptions(1, multicast=("239.1.1.1", 5000)))
    for host in ("10.0.0.1", "a.example", "ff02::1"):
        with pytest.raises(OptionError, match=r"one of 239\.0\.0\.0/8"):
            AggregationServer(AggregationOptions(1, udp=True, multicast=(host, 5000)))


# -- processes that are killed ------------------------------------------------------------------------------


class Relay:
    """A line to a server that can be cut."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
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
                pair = self._listener.accept()[0], socket.create_connection(self._to)
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


def test_a_worker_that_is_lost_for_a_moment_before_all_have_come_is_waited_for(job):
    patience = 2.0
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    address = job.serve(workers=2, patience=timedelta(seconds=patience), on_event=events.put)
    relay = Relay(address)
    job.clients.append(AggregationClient(relay.address, jobs.terms(2), 0))
    threading.Event().wait(1.2 * patience)  # the other has not come for longer than a lost worker is waited for
    relay.cut()
    heard = []
    while heard[-1:] != ["Worker 0: joined"] or len(heard) < 3:
        heard.append(events.get(timeout=WAIT))
    job.clients.append(AggregationClient(address, jobs.terms(2), 1))
    check_round(job.clients, 0)
    relay.close()


def serve_process(line: Any, port: int, options: dict[str, Any]) -> None:
    try:
        server = AggregationServer(AggregationOptions(port=port, **options))
        with stopped_by_signals(server):
            line.send(("port", server.address[1]))
            server.run(lambda text: None)
        line.send(("ended", ""))
    except SyncError as error:
        line.send(("ended", f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("udp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_is_killed_or_stopped_comes_back_and_no_result_changes(job, udp, number):
    options = {"workers": 2, "udp": udp}
    first = Process(serve_process, 0, options)
    port = first.hear("port")
    clients = job.join(("127.0.0.1", port), jobs.terms(2))
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
            assert out.tobytes() == jobs.expected(clients[0].terms, 1, stream, slice(None), counted).tobytes()
    check_round(clients, 2)
    for client in clients:
        client.close()
    assert second.hear("ended") == ""
    second.end()


def work_process(line: Any, port: int) -> None:
    client = AggregationClient(("127.0.0.1", port), jobs.terms(2), 1)
    line.send(("pid", os.getpid()))
    work(client, range(1 << 30))


def work(client: AggregationClient, rounds: range) -> None:
    for round_ in rounds:
        for _, future in submit_all(client, round_):
            future.result(WAIT)


def test_a_worker_that_is_killed_ends_the_job_with_its_name(job):
    address = job.serve(workers=2, patience=timedelta(seconds=0.5))
    worker = Process(work_process, address[1])
    client = AggregationClient(address, jobs.terms(2), 0)
    job.clients.append(client)
    worker.hear("pid")
    work(client, range(10))
    worker.signal(signal.SIGKILL)
    with pytest.raises(SyncError, match=r"workers \[1\] within 0.5 s"):
        work(client, range(10, 1 << 30))
    worker.end()
    assert job.end().rank == 1


def test_strangers_and_garbage_beside_a_job_change_nothing(job):
    """Ten thousand datagrams of others while sums are formed."""
    terms = jobs.terms()
    address = job.serve(udp=True)
    clients = job.join(address, terms)
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
    """Whoever hears the network sends what workers and server have said once more, tag and all, to whom it was for."""
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
    clients = job.join(job.serve(udp=True), jobs.terms())
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
