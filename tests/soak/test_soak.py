"""Chaos in a short form, and the jobs that have failed once."""

import pytest

from tests.soak.campaign import LONG_SECONDS, SETTLED_SECONDS, check_growth, run_job
from tests.soak.job import BrokenPromiseError, Vitals

SHORT = ("mesh:1", "parameter-server:1", "aggregator-tcp:1", "aggregator-udp:1")
FAILED_ONCE: tuple[str, ...] = ()


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.loss
@pytest.mark.timeout(240)
@pytest.mark.parametrize("job", [*SHORT, *FAILED_ONCE])
def test_nothing_is_lost_whatever_happens(job: str) -> None:
    kind, _, seed = job.partition(":")
    outcome = run_job(kind, int(seed))
    assert outcome.faults.total() > 2
    assert any(vitals.duration for vitals in outcome.vitals), "growth was looked at"


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
