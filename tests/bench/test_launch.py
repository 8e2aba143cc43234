"""Links that ranks ask for in the lab, and the time limit of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.bench.job import BenchmarkJob, RateRequest, Segment, to_line
from gradwire.bench.launch import RanksError, _Listener, launch
from gradwire.lab import Lab


@pytest.mark.root
def test_a_servers_link_has_its_share_of_the_rate_that_ranks_ask_for(tmp_path: Path) -> None:
    with Lab(2) as lab:
        listener = _Listener(tmp_path, lambda message: None)
        listener.lab, listener.server = lab, (1, 4.0)
        listener(0, "stdout", to_line(RateRequest(1, "100mbit")))
        assert lab.rates == (100_000_000, 400_000_000)
        listener(0, "stdout", to_line(RateRequest(2, None)))
        assert lab.rates == (None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"rate-1", "rate-2"}


def test_a_job_that_is_ended_by_its_time_limit_has_failed_however_its_ranks_end() -> None:
    job = BenchmarkJob(workload="", segments=(), folder="", deadline_seconds=2.0)
    with pytest.raises(RanksError, match="The time limit was reached"):
        launch(job, 2, module="tests.bench.patient_rank")


@pytest.mark.ci
@pytest.mark.parametrize("lab", [False, pytest.param(True, marks=pytest.mark.root)])
def test_ranks_find_each_other_whatever_rendezvous_this_process_has(lab: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"GLOO_SOCKET_IFNAME": "nosuch0", "MASTER_ADDR": "192.0.2.1", "RANK": "7", "WORLD_SIZE": "8"}
    for name, value in elsewhere.items():
        monkeypatch.setenv(name, value)
    job = BenchmarkJob("digits", (Segment("ddp-fp32", train_steps=1),), folder="", deadline_seconds=60.0)
    assert sorted(outcome.rank for outcome in launch(job, 2, lab=lab)) == [0, 1]
