"""A server whose sums the kernel forms, with real interfaces, sockets and workers."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys

import pytest

from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.xdp.server import check_waits
from gradwire.core.errors import DisagreementError, OptionError
from gradwire.lab import Lab
from tests.aggregator.aggregation_job import digest
from tests.aggregator.xdp import host
from tests.schedules import jobs

ROUNDS = 5
ADDED_UP = "The kernel adds up 292 of 302 packets at eth0"  # in 195 packets of 1,024, and 97 of 512 of 16 bits


def alone(case: str, *arguments: str) -> dict:
    """Run a case of `alone.py` in a network namespace of its own."""
    command = ["unshare", "-n", sys.executable, "-m", "tests.aggregator.xdp.alone", case, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
@pytest.mark.loss
@pytest.mark.parametrize(
    ("mode", "guard"), [("generic", "siphash"), ("native", "crc32c"), ("broadcast", "siphash"), ("broadcast", "crc32c")]
)
def test_workers_get_the_kernels_sums_with_loss(mode, guard):
    command = [sys.executable, "-m", "tests.aggregator.xdp.host", str(ROUNDS), mode, guard]
    with Lab(4, "1gbit", loss="1%") as lab:
        if mode == "broadcast":
            lab.receive_by_napi(0)
        result = lab.run(command, env={"GRADWIRE_JOB_KEY": secrets.token_hex(32)}, timeout=100).check()
    workers = [json.loads(each.stdout) for each in result.hosts[1:]]
    assert {worker["digest"] for worker in workers} == {digest(host.CONFIG, ROUNDS)}
    server = json.loads(result.hosts[0].stdout)
    assert ADDED_UP in server["said"]
    assert server["taken"] == {"kernel": ROUNDS * 3 * 292, "server": ROUNDS * 3 * 10}, "each contribution once"
    assert sum(each.drops.loss for each in result.hosts) > 20
    assert sum(worker["forged"] + worker["corrupt"] + worker["refused"] for worker in workers) == 0
    assert [json.loads(each.stdout)["fragments"] for each in result.hosts] == [0] * 4


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
@pytest.mark.loss
def test_the_programs_of_two_hosts_share_the_sums():
    command = [sys.executable, "-m", "tests.aggregator.xdp.sharded_host", str(ROUNDS), "generic"]
    with Lab(5, "1gbit", loss="1%") as lab:
        result = lab.run(command, env={"GRADWIRE_JOB_KEY": secrets.token_hex(32)}, timeout=100).check()
    *servers, first, second, third = (json.loads(each.stdout) for each in result.hosts)
    assert first == second == third == digest(host.CONFIG, ROUNDS)
    added = [re.search(r"adds up (\d+) of \d+ packets at eth0", "\n".join(said)) for said in servers]
    counts = [int(found.group(1)) for found in added if found]
    assert len(counts) == 2 and sum(counts) == 292 and min(counts) > 100


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_a_killed_server_detaches_and_its_successor_changes_no_result(tmp_path):
    command = [sys.executable, "-m", "tests.aggregator.xdp.host", str(ROUNDS), "generic", "siphash", str(tmp_path)]
    with Lab(4, "1gbit") as lab:
        result = lab.run(command, env={"GRADWIRE_JOB_KEY": secrets.token_hex(32)}, timeout=280).check()
    found = json.loads(result.hosts[0].stdout.splitlines()[-1])
    workers = [json.loads(each.stdout) for each in result.hosts[1:]]
    assert found["attached"]
    assert not found["detached"]
    assert not found["after"]
    assert ADDED_UP in found["said"]
    assert "All workers have finished." in found["said"]
    assert {worker["digest"] for worker in workers} == {digest(host.CONFIG, ROUNDS)}


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_an_interface_that_cannot_be_had_is_an_error_with_advice():
    found = alone("taken")
    assert "Another XDP program is attached. Detach it: ip link set dev lo xdp off." in found["second"]
    assert "Its driver does not run XDP programs itself. Pass --xdp-mode generic." in found["native"]
    assert "does not send what XDP programs redirect to it. Pass --xdp-mode native." in found["broadcast"]


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_results_beyond_a_frame_are_refused_with_advice():
    found = alone("long_frames")
    advice = "do not fit the frames of idle, whose mtu is 1500. Pass mtu=1500 to gradwire.Aggregator on all workers"
    assert advice in found["worker"]
    assert not found["server ended"]


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_packets_that_come_another_way_end_the_job_with_advice():
    found = alone("elsewhere")
    assert set(found) == {"worker", "server"}
    for said in found.values():
        assert "not through idle, or as fragments. Pass the interface that faces the workers to --xdp" in said


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_a_worker_whose_sums_the_kernel_cannot_hold_is_refused_and_the_job_goes_on():
    found = alone("refused")
    assert len(found["workers"]) == 2
    for said in found["workers"]:
        assert "Send fewer tensors through the aggregator, raise the fraction, or serve without --xdp" in said
    assert "All workers have finished." in found["server"]


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
@pytest.mark.parametrize("first", ["0", "1"])
def test_a_worker_that_has_all_results_is_asked_after_a_restart_for_what_another_lacks(first):
    """It sends nothing of its own, so the program does not know where its packets go."""
    found = alone("restarted", first)
    assert "The kernel adds up 39 of 41 packets at other" in found["server"]
    assert "All workers have finished." in found["server"]


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.root
@pytest.mark.bpf
def test_answers_that_a_driver_keeps_no_metadata_for_end_the_job_with_advice():
    found = alone("without_metadata")
    assert set(found) == {"server", "worker 0", "worker 1"}
    for said in found.values():
        assert "the driver of idle keeps no metadata with a packet. Start the server with --xdp-mode generic." in said


@pytest.mark.parametrize("options", [{}, {"udp": True, "drop": 0.1}, {"udp": True, "multicast": ("239.71.87.1", 7)}])
def test_options_that_do_not_go_together(options):
    with pytest.raises(OptionError, match="--xdp takes datagrams and answers each worker: pass --udp"):
        AggregationServer(AggregationOptions(2, port=0, xdp="lo", **options))


def test_an_address_of_ipv6_is_refused_before_anything_is_attached():
    with pytest.raises(OptionError, match=r"IPv4 alone, and ::1 is an IPv6 address\. Pass an IPv4 address to --host"):
        AggregationServer(AggregationOptions(2, "::1", udp=True, xdp="eth77"))


def test_workers_that_do_not_wait_for_all_sums_are_refused_with_advice():
    check_waits(jobs.config())
    with pytest.raises(DisagreementError, match=r"go on after 0\.1 s\. Start the server with --udp and without --xdp"):
        check_waits(jobs.config(fill_seconds=0.1))
