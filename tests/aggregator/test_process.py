"""The aggregation server over real sockets: sums, shutdown, killed processes."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.datagram_keys import group_key
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, SERVER, PacketKey, PacketKind, pack, seal
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.core.errors import OptionError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.net.datagrams import DatagramReceiver, DatagramSender, DatagramSocket
from gradwire.wire.frame import FrameKind
from tests.aggregator.aggregation_job import SHORT, WAIT, check_round, submit_all
from tests.integration.launch import free_port
from tests.net.certificates import Authority
from tests.net.recorder import until
from tests.schedules import jobs


@pytest.mark.parametrize("options", [{}, {"udp": True}, {"udp": True, "drop": 0.1}], ids=["tcp", "udp", "lossy"])
def test_sums_over_sockets(job, options):
    config = jobs.config()
    clients = job.join(job.serve(**options), config)
    for round_ in range(5):
        check_round(clients, round_)
    for client in clients:
        client.close()
    assert job.end() is None


@pytest.mark.parametrize("udp", [False, True])
def test_packets_do_not_wait_for_the_lock_of_joins(job, udp):
    clients = job.join(job.serve(udp=udp), jobs.config())
    with job.server._changed:
        for round_ in range(3):
            check_round(clients, round_)


class Breaking(AggregationClient):
    """A client whose thread fails right after a result has come."""

    has_come = False

    def _take(self, datagram: np.ndarray | memoryview, *, from_group: bool = False) -> list[Any]:
        finished = super()._take(datagram, from_group=from_group)
        self.has_come |= bool(finished)
        return finished

    def _send_due(self) -> None:
        if self.has_come:
            raise RuntimeError("this thread fails")
        super()._send_due()


def test_results_that_have_come_are_told_although_the_thread_then_fails(job):
    client = Breaking(job.serve(workers=1, udp=True), jobs.config(1), 0)
    job.clients.append(client)
    with client._changed:  # nothing comes before all is submitted
        results = submit_all(client, 0)
    errors = [future.exception(WAIT) for _, future in results]
    assert None in errors
    assert all("this thread fails" in str(error) for error in errors if error is not None)


def test_a_packet_over_tcp_is_refused_if_packets_are_datagrams(job):
    """The thread that reads datagrams owns the sums alone."""
    clients = job.join(job.serve(udp=True), jobs.config())
    clients[0]._send_frame(FrameKind.PACKET, bytes(PACKET_HEADER_BYTES))
    until(lambda: clients[0]._error is not None)
    with pytest.raises(SyncError, match="Expected a packet of at most 0 bytes"):
        clients[0].check()


def test_a_worker_cannot_forge_results_for_the_others(job):
    """Worker 2 writes to the group under the key that all have, and fills what the others keep."""
    group = ("239.71.87.2", 0x6757)
    clients = job.join(job.serve(udp=True, multicast=group), jobs.config())
    check_round(clients, 0)
    epoch, config = clients[2]._worker.epoch, clients[2].config
    forger = DatagramSender(group_key(clients[2]._key, epoch))
    for _ in range(100):
        forger.trailer(np.empty(0, np.uint8))  # numbers that the server has not reached
    submitted = [submit_all(client, 1) for client in clients[:2]]
    forged = []
    for stream in range(len(config.streams)):
        for index in range(config.num_packets(stream)):
            body = np.ones(config.result_bytes(stream, index), np.uint8)
            frame = np.concatenate([np.zeros(PACKET_HEADER_BYTES, np.uint8), body])
            seal(frame, PacketKind.RESULT, PacketKey(1, stream, index), SERVER, epoch, count=3)
            forged.append(frame)
    obsolete = pack(PacketKind.OBSOLETE, PacketKey(1, 0, 0), SERVER, epoch)
    before = [client.counters.received for client in clients[:2]]
    for packet in [*forged, obsolete] * 2:
        clients[2]._datagrams.multicast_from("127.0.0.1")
        clients[2]._datagrams.send(packet, group, forger)
    for client, count in zip(clients, before):
        until(lambda client=client, count=count: client.counters.received >= count + 2 * len(forged) + 2)
        until(lambda client=client: client.counters.refused == 2)
    assert not any(future.done() for results in submitted for _, future in results)
    submitted.append(submit_all(clients[2], 1))
    for results in submitted:
        for stream, (out, future) in enumerate(results):
            assert future.result(WAIT).counts.tolist() == [3] * config.num_packets(stream)
            assert out.tobytes() == jobs.expected(config, 1, stream, slice(None), [0, 1, 2]).tobytes()
    assert [client.counters.refused for client in clients[:2]] == [2, 2]


def test_results_may_be_multicast(job):
    group = ("239.71.87.1", 0x6757)
    stranger, receiver = DatagramSocket(group, shared=True), DatagramReceiver(bytes(32))
    stranger.join(group[0], "127.0.0.1")
    clients = job.join(job.serve(udp=True, multicast=group), jobs.config())
    for round_ in range(3):
        check_round(clients, round_)
    heard = [receiver.open(datagram) for _, datagram in stranger.receive(64)]
    assert heard == [None] * 3 * 5  # rounds times packets: one for all workers; without the job's key nothing counts
    stranger.close()


@pytest.mark.parametrize("udp", [False, True])
def test_a_name_of_this_machine_is_one_address_for_connection_and_datagrams(job, monkeypatch, udp):
    """Even if localhost resolves to ::1 first and the server listens at 127.0.0.1."""
    look_up = socket.getaddrinfo

    def ipv6_first(host: Any, port: Any, family: int = 0, *rest: Any, **options: Any) -> list[Any]:
        found = look_up(host, port, family, *rest, **options)
        if host == "localhost" and family == socket.AF_UNSPEC:
            return [(socket.AF_INET6, *found[0][1:4], ("::1", port or 0, 0, 0)), *found]
        return found

    monkeypatch.setattr(socket, "getaddrinfo", ipv6_first)
    _, port = job.serve(udp=udp)
    check_round(job.join(("localhost", port), jobs.config()), 0)


def test_small_buffers_and_many_workers(job):
    config = jobs.config(16)
    address = job.serve(workers=16, udp=True)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        job.server._datagrams.socket.setsockopt(socket.SOL_SOCKET, option, 4096)
    check_round(job.join(address, config), 0)


def lost_in_buffers(port: int) -> int:
    """Datagrams for a port that the kernel has dropped, because the buffer of the socket was full."""
    rows = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
    return sum(int(row[12]) for row in rows if int(row[1].partition(":")[2], 16) == port)


def test_counters_account_for_all_datagrams(job, caplog):
    """Every packet sent was received, dropped, forged because it was damaged, or lost in a full buffer."""
    address = job.serve(udp=True, drop=0.1)
    clients = job.join(address, jobs.config())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in (0, 10, 100):
            stranger.sendto(bytes(size), address)
            stranger.sendto(bytes(size), clients[0]._datagrams.address)
    for round_ in range(30):
        check_round(clients, round_)
    until(lambda: clients[0].counters.forged == job.server.counters.forged == 3)

    # A worker that has all results may still send what was due.
    def missing() -> int:
        come = job.server.counters.received + job.server.counters.dropped
        return sum(each.counters.sent for each in clients) - come - lost_in_buffers(address[1])

    until(lambda: missing() == 0)
    lost = lost_in_buffers(address[1])
    with caplog.at_level("INFO", "gradwire"):
        for client in clients:
            client.close()
    assert job.end() is None
    server, workers = job.server.counters, [client.counters for client in clients]
    assert server.dropped > 0
    assert sum(each.sent_again for each in workers) >= server.dropped // 2
    assert server.received + server.dropped + lost == sum(each.sent for each in workers)
    assert [each.forged for each in workers] == [3, 0, 0]
    for rank, each in enumerate(workers):
        where = f"aggregation server at {address[0]}:{address[1]}"
        assert f"Aggregation at rank {rank}, {where}: packets: {each}" in caplog.text


# -- ends ---------------------------------------------------------------------------------------------------


def test_workers_with_different_configurations_are_refused(job):
    address = job.serve(workers=2)
    first = AggregationClient(address, jobs.config(2), 0)
    job.clients.append(first)
    with pytest.raises(SyncError, match="Run one model, plan and version"):
        AggregationClient(address, jobs.config(2, max_misses=3), 1)
    with pytest.raises(SyncError, match=r"Worker 1 belongs to another job.* Give each job a name or a server"):
        AggregationClient(address, jobs.config(2, max_misses=3), 1, session=1)
    second = AggregationClient(address, jobs.config(2), 1)
    job.clients.append(second)
    check_round([first, second], 0)  # the job goes on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_does_not_wait_for_what_only_its_parent_can_hear(job):
    (client,) = job.join(job.serve(workers=1), jobs.config(1))
    held, is_over = threading.Event(), threading.Event()

    def hold() -> None:  # a lock, which the child then has without the thread that would release it
        with client._changed:
            held.set()
            is_over.wait(WAIT)

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait(WAIT)
    child = os.fork()
    if child == 0:
        try:
            submit_all(client, 0)
        except SyncError as error:
            client.close()
            os._exit(not str(error).endswith("start workers with the 'spawn' method."))
        finally:
            os._exit(2)
    is_over.set()
    holding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_round([client], 0)


def test_who_waits_for_a_worker_that_was_refused_is_told_why(job):
    address = job.serve(workers=2, patience=timedelta(seconds=0.5))
    client = AggregationClient(address, jobs.config(2), 0)
    job.clients.append(client)
    (_, waiting), *_ = submit_all(client, 0)
    with pytest.raises(SyncError, match="Run one model, plan and version"):
        AggregationClient(address, jobs.config(2, max_misses=3), 1)
    with pytest.raises(SyncError, match=r"Worker 1 was refused, and has not come back .* Run one model, plan and vers"):
        waiting.result(WAIT)
    assert isinstance(job.end(), PeerTimeoutError)
    assert job.end().rank == 1


def test_a_worker_that_expects_other_workers_is_told_so(job):
    address = job.serve(workers=3)
    with pytest.raises(PeerTimeoutError, match=r"world size 3, got 4 .*the same number of workers"):
        AggregationClient(address, jobs.config(2), 0, connection=ConnectionOptions(timeout=SHORT))


def test_packets_too_large_for_a_datagram_are_refused_with_advice(job):
    config = SessionConfig(1, (jobs.WIDE,), (Stream(Operation.SUM, 100_000),), packet_elements=65_536)
    with pytest.raises(SyncError, match="packet_elements=31744 or less") as caught:
        AggregationClient(job.serve(workers=1, udp=True), config, 0)
    fitting = SessionConfig(1, (jobs.WIDE,), (Stream(Operation.SUM, 100_000),), packet_elements=31_744)
    assert "datagram" in str(caught.value)
    job.join(job.serve(workers=1, udp=True), fitting)


def test_packets_of_whole_blocks_are_refused_with_advice_on_the_block(job):
    streams = (Stream(Operation.SUM, 100_000),)
    config = SessionConfig(2, (jobs.WIDE,), streams, packet_elements=65_536)
    with pytest.raises(SyncError, match="packet_elements=31744 or less, or start the server without --udp"):
        AggregationClient(job.serve(workers=2, udp=True), config, 0)
    partial = SessionConfig(3, (jobs.WIDE,), streams, packet_elements=65_536, fraction=0.6)
    with pytest.raises(SyncError, match="31744 or less, with a compressor whose block is no longer, or start"):
        AggregationClient(job.serve(workers=3, udp=True), partial, 0)


def test_a_worker_that_fails_ends_the_job_on_all_workers(job):
    clients = job.join(job.serve(), jobs.config())
    waiting = submit_all(clients[0], 0)
    clients[1].close("its disk is full")
    with pytest.raises(SyncError, match="its disk is full"):
        waiting[0][1].result(WAIT)
    assert "its disk is full" in str(job.end())


def test_a_worker_that_finishes_early_ends_the_job_on_all_workers(job):
    clients = job.join(job.serve(), jobs.config())
    waiting = submit_all(clients[0], 0)
    clients[2].close()
    with pytest.raises(SyncError, match=r"\[2\] have finished"):
        waiting[0][1].result(WAIT)
    assert isinstance(job.end(), PeerLostError)


@pytest.mark.parametrize("udp", [False, True])
def test_a_worker_that_holds_up_a_result_is_named(job, udp):
    clients = job.join(
        job.serve(udp=udp), jobs.config(), connection=ConnectionOptions(stall_timeout=timedelta(seconds=2))
    )
    waiting = [submit_all(client, 0) for client in clients[:2]]
    for results in waiting:
        with pytest.raises(SyncError, match=r"Workers \[2\] did not send round 0 of stream \d within 2 s"):
            results[0][1].result(WAIT)
    error = job.end()
    assert isinstance(error, PeerTimeoutError)
    assert error.rank == 2


@pytest.mark.ci
@pytest.mark.parametrize("udp", [False, True])
def test_a_live_worker_may_hold_up_a_result_for_longer_than_a_silent_one(job, udp):
    silence = 4 * SHORT  # all threads of this process are one another's noise
    options = ConnectionOptions(timeout=silence)
    clients = job.join(job.serve(udp=udp, timeout=silence, patience=silence), jobs.config(), connection=options)
    check_round(clients, 0)
    waiting = [submit_all(client, 1) for client in clients[:2]]
    threading.Event().wait(1.5 * silence.total_seconds())  # worker 2 evaluates
    waiting.append(submit_all(clients[2], 1))
    for results in waiting:
        for _, future in results:
            assert future.result(WAIT).counted.any()


def test_a_client_that_is_interrupted_at_its_start_ends_the_job_and_its_threads(job, monkeypatch):
    def interrupt(condition: threading.Condition, *arguments: Any) -> None:
        monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
        wait_for(condition, *arguments)
        raise KeyboardInterrupt

    address, wait_for = job.serve(workers=1), threading.Condition.wait_for
    monkeypatch.setattr(threading.Condition, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        AggregationClient(address, jobs.config(1), 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gradwire-aggregation")]
    assert "This worker could not start" in str(job.end())
    del raised  # held until here, with the client


def test_an_unreachable_server(job):
    address = job.serve(workers=1)
    job.join(address, jobs.config(1))[0].close()
    job.end()
    with pytest.raises(PeerTimeoutError, match=r"no connection for 1 s .* Start it with: gradwire serve --aggregate"):
        AggregationClient(address, jobs.config(1), 0, connection=ConnectionOptions(timeout=SHORT))


@pytest.mark.parametrize("number", [4, 6])  # no matter how the numbers compare, for they come from different machines
def test_an_older_session_is_refused(job, number):
    address = job.serve(workers=2, udp=True)
    config = jobs.config(2)
    old = job.join(address, config, session=5)
    check_round(old, 0)
    waiting = submit_all(old[0], 1)
    new = [AggregationClient(address, config, rank, session=number) for rank in range(2)]
    job.clients += new
    with pytest.raises(SyncError, match="started again"):
        waiting[0][1].result(WAIT)
    check_round(new, 0)
    with pytest.raises(SyncError, match="The job of worker 0 has been started again since"):
        AggregationClient(address, config, 0, session=5)
    check_round(new, 1)


def test_what_is_left_of_an_older_session_does_not_end_the_next_one(job):
    patience = 0.5
    address = job.serve(workers=2, patience=timedelta(seconds=patience))
    config = jobs.config(2)
    check_round(job.join(address, config, session=5), 0)
    new = [AggregationClient(address, config, 0, session=6)]  # the other one still starts
    job.clients += new
    with pytest.raises(SyncError, match="started again since"):
        AggregationClient(address, config, 1, session=5)
    threading.Event().wait(3 * patience)
    new.append(AggregationClient(address, config, 1, session=6))
    job.clients += new[1:]
    check_round(new, 0)


def test_arguments_that_do_not_fit_the_configuration_are_refused_at_once(job):
    config = jobs.config(1)
    client = job.join(job.serve(workers=1), config)[0]
    out = np.empty(40, np.float32)
    with pytest.raises(ValueError, match="There are 3 streams"):
        client.submit(0, 3, None, out)
    with pytest.raises(ValueError, match="float32 of 40 elements"):
        client.submit(0, 1, None, np.empty(41, np.float32))
    with pytest.raises(ValueError, match="160 bytes of stream 1"):
        client.submit(0, 1, np.zeros(39, np.float32), out)
    client.submit(3, 1, np.zeros(40, np.float32), out).result(WAIT)
    with pytest.raises(ValueError, match="Wait for the future"):
        client.submit(3, 1, np.zeros(40, np.float32), out)


def test_a_key_is_needed_beyond_loopback_and_datagrams_for_multicast(monkeypatch):
    monkeypatch.delenv("GRADWIRE_JOB_KEY", raising=False)
    monkeypatch.delenv("GRADWIRE_JOB_KEY_FILE", raising=False)
    with pytest.raises(OptionError, match="GRADWIRE_JOB_KEY_FILE"):
        AggregationServer(AggregationOptions(1, host="0.0.0.0"))
    with pytest.raises(OptionError, match="udp=True"):
        AggregationServer(AggregationOptions(1, multicast=("239.1.1.1", 5000)))
    for host in ("10.0.0.1", "a.example", "ff02::1"):
        with pytest.raises(OptionError, match=r"one of 239\.0\.0\.0/8"):
            AggregationServer(AggregationOptions(1, udp=True, multicast=(host, 5000)))


def test_a_server_that_cannot_be_made_leaves_its_address_free(job):
    port = free_port()
    with pytest.raises(OptionError, match="too short") as raised:
        AggregationServer(AggregationOptions(2, port=port, udp=True, timeout=timedelta(seconds=0.5)))
    job.serve(port=port, udp=True)
    del raised  # held until here, with all that it refers to


@pytest.mark.parametrize("udp", [False, True])
def test_a_server_and_its_workers_under_tls(job, tmp_path, udp):
    """By TCP, everything is encrypted. By UDP, agreements are, and with them the keys of datagrams."""
    authority = Authority(tmp_path)
    address = job.serve(udp=udp, tls=authority.files("server"))
    connection = ConnectionOptions(tls=authority.files("worker"))
    clients = job.join(address, jobs.config(), connection=connection)
    for round_ in range(3):
        check_round(clients, round_)
    for client in clients:
        client.close()
    assert job.end() is None
