"""Chaos in a short form, and the jobs that have failed once."""

import time
from pathlib import Path

import pytest

from tests.soak.campaign import LONG_SECONDS, SETTLED_SECONDS, check_growth, run_job
from tests.soak.job import START, BrokenPromiseError, Fault, Vitals
from tests.soak.servers import SERVER, DatagramJob

LIVES_LONG = "aggregator-tcp:1"  # nobody is killed, and a long freeze alone takes 11 seconds
SHORT = ("mesh:1", "parameter-server:1", LIVES_LONG, "aggregator-udp:1")
FAILED_ONCE = ("aggregator-udp:31", "aggregator-udp:4019")


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.loss
@pytest.mark.timeout(240)
@pytest.mark.parametrize("job", [*SHORT, *FAILED_ONCE])
def test_nothing_is_lost_whatever_happens(job: str) -> None:
    kind, _, seed = job.partition(":")
    outcome = run_job(kind, int(seed))
    assert outcome.faults.total() > 2
    if job == LIVES_LONG:
        lives = [vitals.duration for vitals in outcome.vitals]
        assert min(lives) >= SETTLED_SECONDS, "threads and descriptors of all processes were looked at"


class LateJob(DatagramJob):
    """Its server is stopped when all workers have finished."""

    def happen(self, fault: Fault) -> None:
        self.until(lambda: all(host.gone for host in self.workers))
        super().happen(fault)


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.loss
def test_a_server_that_is_started_again_after_the_last_step_has_nothing_to_wait_for(tmp_path: Path) -> None:
    job = LateJob(0, tmp_path, scale=0.3)
    job.faults = [Fault(job.steps // 2, "stop", SERVER)]
    began = time.monotonic()
    assert job.run().faults == {"stop": 1}
    assert job.is_idle
    assert time.monotonic() - began < START, "nobody has waited for a step"


def vitals(duration: float, **growth: float) -> Vitals:
    """Vitals of a process, read twice a second, of which some grow by this much a second."""
    seconds = [0.5 * at for at in range(int(2 * duration) + 1)]
    start = {"memory": 500 << 20, "threads": 20, "descriptors": 30}
    values = {name: [int(each + growth.get(name, 0) * at) for at in seconds] for name, each in start.items()}
    return Vitals("a process", seconds, **values)


@pytest.mark.parametrize("grows", ["threads", "descriptors"])
def test_a_process_that_gets_more_threads_or_descriptors_is_found(grows: str) -> None:
    check_growth(vitals(SETTLED_SECONDS))
    with pytest.raises(BrokenPromiseError, match=f"a process: {grows} grew from .* to"):
        check_growth(vitals(SETTLED_SECONDS, **{grows: 1.0}))


def test_a_process_whose_memory_grows_is_found() -> None:
    """In a long life only: allocators and caches settle slowly."""
    check_growth(vitals(LONG_SECONDS, memory=10 << 10))
    with pytest.raises(BrokenPromiseError, match="a process: memory grows by 70 MB an hour"):
        check_growth(vitals(LONG_SECONDS, memory=(70 << 20) / 3600))
