"""Chaos in a short form, and the jobs that have failed once."""

import pytest

from tests.soak.campaign import run_job

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
