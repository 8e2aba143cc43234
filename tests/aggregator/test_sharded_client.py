"""Several aggregation servers that share each stream: the bits of one server, losses, restarts, and who has failed."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.aggregator.packet import PacketCounters
from gradwire.aggregator.request import Reply
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from gradwire.aggregator.sharded_client import ShardedClient
from gradwire.core.errors import OptionError, SyncError
from gradwire.net.client import ConnectionOptions
from gradwire.wire.frame import FrameFlags
from tests.aggregator.aggregation_job import SHORT, WAIT, Job, check_round, serve_process, submit_all
from tests.schedules import jobs
from tests.server_processes import Process

Address = tuple[str, int]


def uneven(world_size: int = 3, **options: Any) -> SessionConfig:
    """Tensors of several packets, of one, and of less, and norms."""
    streams = (
        Stream(Operation.SUM, 9 * 1024 + 130, 0),
        Stream(Operation.MAXIMUM, 2500),
        Stream(Operation.SUM, 4 * 1024, 1),
        Stream(Operation.SUM, 130, 0),
        Stream(Operation.MAXIMUM, 40),
    )
    return SessionConfig(world_size, (jobs.WIDE, jobs.NARROW), streams, packet_elements=1024, **options)


def join(job: Job, addresses: list[Address], config: SessionConfig, **options: Any) -> list[ShardedClient]:
    made = [ShardedClient(addresses, config, rank, **options) for rank in range(config.world_size)]
    job.clients += made
    return made


@pytest.mark.parametrize("mtu", [0, 1500])
@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"udp": True, "drop": 0.1}], ids=["tcp", "lossy"])
def test_sums_are_those_of_one_server(job: Job, options: dict[str, Any], num_servers: int, mtu: int) -> None:
    """`check_round` compares them with a model that has no packets."""
    clients = join(job, [job.serve(**options) for _ in range(num_servers)], uneven(mtu=mtu))
    for round_ in range(3):
        check_round(clients, round_)
    for client in clients:
        client.close()
    for _, thread in job.servers:
        thread.join(WAIT)
    assert job.ends == [None] * num_servers


def test_results_may_be_multicast(job: Job) -> None:
    groups = [(f"239.71.87.{number}", 0x6758) for number in (3, 4)]
    clients = join(job, [job.serve(udp=True, multicast=group) for group in groups], uneven())
    for round_ in range(3):
        check_round(clients, round_)


def test_counters_add_up_and_each_server_is_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    addresses = [job.serve(workers=1) for _ in range(2)]
    (client,) = join(job, addresses, uneven(1))
    check_round([client], 0)
    num_packets = sum(client.config.num_packets(stream) for stream in range(len(client.config.streams)))
    assert client.counters == PacketCounters.total(each.counters for each in client.clients)
    assert client.counters.sent == client.counters.taken == num_packets
    assert min(each.counters.sent for each in client.clients) > 0
    assert client.header_bytes(0) == 10 * client.clients[0].header_bytes(0) / client.clients[0].config.num_packets(0)
    with caplog.at_level("INFO", "gradwire"):
        client.close()
    for (host, port), each in zip(addresses, client.clients, strict=True):
        said = f"Aggregation at rank 0, aggregation server at {host}:{port}: packets: {each.counters}"
        assert said in caplog.text


def test_replies_name_the_workers_of_all_packets() -> None:
    parts = [
        Reply(
            np.array([2, 3]),
            np.array([[True, True, False], [True] * 3]),
            FrameFlags.USED,
            1024,
            np.array([False, True]),
        ),
        Reply(np.array([2]), np.array([[False, True, True]]), FrameFlags.PRESENT, 1024, np.array([False])),
    ]
    whole = Reply.join(parts)
    assert whole.counts.tolist() == [2, 3, 2] and whole.counted[2].tolist() == [False, True, True]
    assert whole.filled.tolist() == [False, True, False]
    assert whole.flags == FrameFlags.USED | FrameFlags.PRESENT
    assert whole.counts_of_blocks(1024, 3).tolist() == [2, 3, 2]


# -- failures -----------------------------------------------------------------------------------------------


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    process.process.join()
    process.end()


def check_results(config: SessionConfig, results: list[tuple[np.ndarray, Future[Reply]]], round_: int) -> None:
    for stream, (out, future) in enumerate(results):
        counted = np.flatnonzero(future.result(WAIT).counted[0]).tolist()
        assert out.tobytes() == jobs.expected(config, round_, stream, slice(None), counted).tobytes()


@pytest.mark.parametrize("udp", [False, True])
def test_restarting_the_second_server_changes_no_result(job: Job, udp: bool) -> None:
    options = {"workers": 2, "udp": udp}
    addresses = [job.serve(**options) for _ in range(2)]
    clients = join(job, addresses, uneven(2))
    check_round(clients, 0)
    half = submit_all(clients[0], 1)  # of a round that the other has not begun
    job.server.stop("It moves.", for_good=False)
    assert "It moves." in str(job.end())
    assert job.serve(**options, port=addresses[1][1]) == addresses[1]
    for results in (half, submit_all(clients[1], 1)):
        check_results(clients[0].config, results, 1)
    check_round(clients, 2)


@pytest.mark.ci
@pytest.mark.parametrize("udp", [False, True])
def test_killing_the_second_server_and_starting_it_again_changes_no_result(job: Job, udp: bool) -> None:
    options = {"workers": 2, "udp": udp}
    first = Process(serve_process, 0, options)
    port = first.hear("port")
    clients = join(job, [job.serve(**options), ("127.0.0.1", port)], uneven(2))
    check_round(clients, 0)
    half = submit_all(clients[0], 1)
    kill(first)
    second = Process(serve_process, port, options)
    assert second.hear("port") == port
    for results in (half, submit_all(clients[1], 1)):
        check_results(clients[0].config, results, 1)
    for client in clients:
        client.close()
    assert second.hear("ended") == ""
    second.end()
    assert job.end() is None


def test_a_server_that_ends_is_one_error_that_names_it(job: Job) -> None:
    addresses = [job.serve(workers=2) for _ in range(2)]
    clients = join(job, addresses, uneven(2))
    check_round(clients, 0)
    (_, waiting), *_ = submit_all(clients[0], 1)
    job.server.stop("The machine is needed.")
    named = f"The aggregation server at 127.0.0.1:{addresses[1][1]} has ended: .*The machine is needed"
    with pytest.raises(SyncError, match=named) as caught:
        waiting.result(WAIT)
    with pytest.raises(SyncError, match=named):
        submit_all(clients[0], 2)
    clients[0].close(str(caught.value))
    for _, thread in job.servers:
        thread.join(WAIT)
    assert "The machine is needed" in str(job.ends[-1]), "the other server knows, and tells the other ranks"


@pytest.mark.ci
def test_a_server_that_stays_away_is_one_error_that_names_it(job: Job) -> None:
    lost = Process(serve_process, 0, {"workers": 2})
    port = lost.hear("port")
    options = ConnectionOptions(timeout=4 * SHORT)  # the machine may be busy
    clients = join(job, [job.serve(workers=2), ("127.0.0.1", port)], uneven(2), connection=options)
    check_round(clients, 0)
    kill(lost)
    (_, waiting), *_ = submit_all(clients[0], 1)
    with pytest.raises(SyncError, match=f"The aggregation server at 127.0.0.1:{port} gave rank 0 no"):
        waiting.result(WAIT)


def test_a_server_that_refuses_this_rank_ends_the_start_and_the_other_server_is_told(job: Job) -> None:
    streams = (Stream(Operation.SUM, 200_000),)
    config = SessionConfig(1, (jobs.WIDE,), streams, packet_elements=65_536)
    addresses = [job.serve(workers=1), job.serve(workers=1, udp=True)]
    advice = f"The aggregation server at 127.0.0.1:{addresses[1][1]} has ended: .*packet_elements=31744 or less"
    with pytest.raises(SyncError, match=advice):
        ShardedClient(addresses, config, 0)
    job.servers[0][1].join(WAIT)
    assert "packet_elements=31744 or less" in str(job.ends[0])


def test_workers_whose_shards_differ_are_refused(job: Job) -> None:
    """As if rank 1 had fewer servers; a synchronizer refuses that before it connects."""
    addresses = [job.serve(workers=2) for _ in range(2)]
    job.clients.append(ShardedClient(addresses, uneven(2), 0))
    with pytest.raises(SyncError, match="Run one model, plan and version"):
        ShardedClient(addresses[:1], uneven(2), 1)


def test_a_server_is_named_once() -> None:
    with pytest.raises(OptionError, match=r"named twice: 127.0.0.1:7071, localhost:7071. Name each server once\."):
        ShardedClient([("127.0.0.1", 7071), ("localhost", 7071)], uneven(), 0)


def test_arguments_that_do_not_fit_the_whole_stream_are_refused(job: Job) -> None:
    (client,) = join(job, [job.serve(workers=1) for _ in range(2)], uneven(1))
    with pytest.raises(ValueError, match="float32 of 2500 elements"):
        client.submit(0, 1, None, np.empty(2501, np.float32))
    with pytest.raises(ValueError, match="10000 bytes of stream 1"):
        client.submit(0, 1, np.zeros(2501, np.float32), np.empty(2500, np.float32))


def test_a_stalled_worker_is_named_by_the_server_that_waits(job: Job) -> None:
    options = ConnectionOptions(stall_timeout=timedelta(seconds=0.3))
    clients = join(job, [job.serve(workers=2) for _ in range(2)], uneven(2), connection=options)
    waiting = submit_all(clients[0], 0)
    with pytest.raises(SyncError, match=r"The aggregation server at 127.0.0.1:\d+ has ended: .*Workers \[1\]"):
        waiting[0][1].result(WAIT)
