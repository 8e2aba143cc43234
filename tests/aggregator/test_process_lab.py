"""The aggregation server on links that lose packets: the results are the same as without loss."""

from __future__ import annotations

import json
import secrets
import sys

import pytest

from gradwire.lab import Lab, LabResult
from tests.aggregator import aggregation_host
from tests.aggregator.aggregation_job import digest

ROUNDS = 5


def run(lab: Lab, mtu: int, *how: str) -> LabResult:
    command = [sys.executable, "-m", "tests.aggregator.aggregation_host", str(ROUNDS), str(mtu), *how]
    return lab.run(command, env={"GRADWIRE_JOB_KEY": secrets.token_hex(32)}, timeout=100)


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.loss
@pytest.mark.parametrize("how", [(), ("multicast",)], ids=["unicast", "multicast"])
def test_loss_changes_no_bit(how: tuple[str, ...]) -> None:
    with Lab(4, "100mbit", loss="1%") as lab:
        result = run(lab, 1500, *how).check()
    workers = [json.loads(host.stdout) for host in result.hosts[1:]]
    assert {worker["digest"] for worker in workers} == {digest(aggregation_host.config(1500), ROUNDS)}
    assert sum(host.drops.loss for host in result.hosts) > 20
    assert sum(worker["sent_again"] for worker in workers) > 5
    assert sum(worker["sent_again"] for worker in workers) < 0.1 * sum(worker["sent"] for worker in workers)


@pytest.mark.ci
@pytest.mark.root
def test_packets_of_the_links_mtu_are_not_fragmented_in_either_direction() -> None:
    fragments, digests = {}, set()
    for mtu in (0, 1500):
        with Lab(4, "100mbit") as lab:
            found = [json.loads(host.stdout) for host in run(lab, mtu).check().hosts]
        fragments[mtu] = [host["fragments"] for host in found]
        digests |= {worker["digest"] for worker in found[1:]}
    assert min(fragments[0]) > 1000, "packets of 1,024 elements with sums of 16 bits are fragments of their datagrams"
    assert fragments[1500] == [0] * 4
    assert digests == {digest(aggregation_host.config(1500), ROUNDS)}


@pytest.mark.ci
@pytest.mark.root
def test_packets_beyond_the_links_mtu_are_refused_with_advice() -> None:
    with Lab(4, "100mbit") as lab:
        result = run(lab, 9000)
    said = "".join(host.stderr for host in result.hosts[1:])  # the first to end ends the others
    assert "Packets of up to 9000 bytes do not fit the path" in said
    assert "whose mtu is 1500. Pass mtu=1500 on all workers." in said
