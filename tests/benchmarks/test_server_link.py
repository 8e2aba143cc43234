"""What is made of interface counters: shares of a busy link."""

from __future__ import annotations

import math

import pytest
from benchmarks.micro.server_link import METRICS, sharing, table

RATE = 8e6  # a megabyte per second


def samples(pushed: list[int], pulled: list[int], seconds: int = 2) -> list[tuple[float, list[tuple[int, int]]]]:
    """Counters every tenth of a second, for workers that push and pull these bytes in a second."""

    def hosts(at: float) -> list[tuple[int, int]]:
        workers = [(round(push * at), round(pull * at)) for push, pull in zip(pushed, pulled, strict=True)]
        return [(sum(pull for _, pull in workers), sum(push for push, _ in workers)), *workers]

    return [(at / 10, hosts(at / 10)) for at in range(10 * seconds + 1)]


def test_equal_and_unequal_shares_of_a_link_that_is_busy_in_one_direction() -> None:
    found = sharing(samples([250_000] * 4, [1000] * 4), RATE)
    assert found["fairness_push"] == pytest.approx(1.0)
    assert math.isnan(found["fairness_pull"])
    assert (found["busy_push"], found["busy_pull"], found["busy_both"]) == (1.0, 0.0, 0.0)
    found = sharing(samples([1_000_000, 0, 0, 0], [500_000, 500_000, 0, 0]), RATE)
    assert (found["fairness_push"], found["fairness_pull"]) == pytest.approx((0.25, 0.5))
    assert found["busy_both"] == 1.0


def test_without_samples_nothing_is_known() -> None:
    assert all(math.isnan(value) for value in sharing([], RATE).values())


def test_the_table_has_intervals_over_the_runs() -> None:
    fixed = {"rate": "100mbit", "method": "none", "case": "as is"}
    rows = [{**fixed, "run": run, "metric": metric, "value": 1.0 + run} for run in range(3) for metric in METRICS]
    assert "| 100mbit | none | as is | 2e+03 ± 2.5e+03 | 2 ± 2.5 |" in table(rows)
    never_busy = [{**row, "value": math.nan} if row["metric"] == "fairness_pull" else row for row in rows]
    assert "2 ± 2.5 | – | 200 ± 2.5e+02, 200 ± 2.5e+02" in table(never_busy)
