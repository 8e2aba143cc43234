"""The table of 3LC's trainings."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.papers.threelc.training import DESIGNS, FULL_RATE, hurry, table

RATES = ("10mbit", "100mbit", FULL_RATE)


def rows(num_runs: int) -> list[dict[str, Any]]:
    """Figures of floats and of 3LC, which is four times as fast in the first run and six times in the second."""
    found = []
    for label, step in (("32-bit float", 1.2), ("3LC (s=1.00)", 0.3)):
        for run in range(num_runs):
            fixed = {"method": label, "seed": run, "share": None}
            seconds = step / (1 + run / 2) if step < 1 else step
            for rate in RATES:
                found.append({**fixed, "rate": rate, "metric": "step", "value": seconds})
                found.append({**fixed, "rate": rate, "metric": "step_over_ideal", "value": 1.5 + run})
        full = {"method": label, "share": 1.0, "rate": FULL_RATE, "seed": 0}
        found += [{**full, "metric": metric, "value": 0.5} for metric in ("accuracy", "bits_pushed", "bits_pulled")]
    return found


@pytest.mark.parametrize(
    ("num_runs", "cell", "over"), [(1, "4.00 (15.9)", "1.50,"), (2, "5.00 ± 12.71 (15.9)", "2.00 ± 6.35,")]
)
def test_speed_ups_have_an_interval_if_there_are_several_runs(num_runs: int, cell: str, over: str) -> None:
    [line] = [line for line in table(rows(num_runs)).splitlines() if "3LC (s=1.00)" in line]
    assert cell in line
    assert over in line


def test_all_designs_take_turns_in_each_run() -> None:
    found = list(hurry(DESIGNS[:2], 2))
    assert [seed for _, _, seed, _ in found] == [0] * 6 + [1] * 6
    assert [(design.label, rate) for design, rate, *_ in found[:6]] == [
        (design.label, rate) for design, rate, *_ in found[6:]
    ]
