"""The aggregation server on links that lose packets: the results are the same as without loss."""

from __future__ import annotations

import json
import secrets
import sys

import pytest

from gradwire.lab import Lab
from tests.aggregator import aggregation_host

ROUNDS = 5


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.loss
@pytest.mark.parametrize("how", [(), ("multicast",)], ids=["unicast", "multicast"])
def test_loss_changes_no_bit(how: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.aggregator.aggregation_host", str(ROUNDS), *how]
    with Lab(4, "100mbit", loss="1%") as lab:
        result = lab.run(command, env={"GRADWIRE_JOB_KEY": secrets.token_hex(32)}, timeout=100).check()
    workers = [json.loads(host.stdout) for host in result.hosts[1:]]
    assert {worker["digest"] for worker in workers} == {aggregation_host.digest(ROUNDS)}
    assert sum(host.drops.loss for host in result.hosts) > 20
    assert sum(worker["sent_again"] for worker in workers) > 5
    assert sum(worker["sent_again"] for worker in workers) < 0.1 * sum(worker["sent"] for worker in workers)
