"""What `auto` costs at rest: one short job."""

import pytest
from benchmarks.micro.auto_at_rest import METHODS, run, table


@pytest.mark.ci
def test_all_runs_of_all_methods_are_timed():
    rows = list(run("digits", ranks=2, steps=2))
    assert sorted((row["method"], row["run"]) for row in rows) == sorted(
        (method, index) for method in METHODS for index in range(6)
    )
    assert min(row["value"] for row in rows) > 0
    assert len(table(rows).splitlines()) == len(METHODS)
