"""The comparison of simulator and lab: calibration with known constants, and the record."""

from dataclasses import asdict, replace

import pytest
from benchmarks.planning import calibration, simulator_error
from benchmarks.planning.calibration import Calibration, Measured

from benchmarks import runner
from gradwire.bench.records import read_figures
from gradwire.planner.curves import LinearCost
from gradwire.simulate import SimulatedModel, step
from tests.simulate.costs import costs

RANKS, RATE, CORES = 4, 1e8, 2
KNOWN = costs(20e-6, frame=LinearCost(8e-6, 2e-10))


def lab(known: Calibration) -> list[Measured]:
    """Measurements of a lab with these constants."""
    found = []
    for kind in (("ring", 4096), ("ring", 1 << 19), ("allgather", 1 << 19)):
        steps = Measured(*kind, 100, 0.0, 0.0, 0.0)
        cluster = known.cluster(RANKS, RATE, CORES)
        result = step(SimulatedModel([steps.gradient]), steps.plan, cluster, known.costs(KNOWN, steps.strategy))
        found.append(
            replace(steps, seconds=result.seconds, processes=result.processor_seconds, busy=result.processor_seconds)
        )
    return found


@pytest.mark.parametrize("known", [Calibration(1e-4, 2e-9, 4e-9, 2e-4, 1.1), Calibration(0.0, 1e-9, 1e-9, 0.0, 1.0)])
def test_calibration_finds_the_constants_of_a_lab(known: Calibration) -> None:
    found = calibration.calibrate(lab(known), KNOWN, RANKS, RATE, CORES)
    for name, value in found._asdict().items():
        lost = 1e-10 if "byte" in name else 1e-5  # too little to be seen in these steps
        assert value == pytest.approx(getattr(known, name), rel=0.05, abs=lost), name


def test_costs_of_a_byte_are_not_told_apart_by_steps_that_are_too_short() -> None:
    short = [replace(each, steps=1) for each in lab(Calibration(1e-4, 2e-9, 4e-9, 2e-4, 1.1))]
    found = calibration.calibrate(short, KNOWN, RANKS, RATE, CORES)
    assert 2e-9 < found.seconds_a_byte == found.seconds_a_byte_to_several < 4e-9


def test_solving_stays_within_the_range() -> None:
    assert calibration.solve(lambda x: x * x, 4.0, 0.0, 10.0) == pytest.approx(2.0, rel=2e-3)
    assert calibration.solve(lambda x: x, 0.5, 1.0, 10.0) == 1.0
    assert calibration.solve(lambda x: x, 20.0, 1.0, 10.0) == 10.0


def test_a_part_of_the_labs_renews_its_rows_and_keeps_the_others(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    row = simulator_error.Comparison(
        4, "1gbit", "ring", "none", 1.0, 0.9, 1.1, 5, 1.0, 0.0, *Calibration(0, 0, 0, 0, 1)
    )
    for each in (row, replace(row, ranks=2, rate="100mbit"), replace(row, measured=2.0)):
        runner.record("simulator-error", [asdict(each)], path, simulator_error.KEY)
    kept = read_figures(path)
    assert [(line["ranks"], line["rate"], line["measured"]) for line in kept] == [
        (4, "1gbit", 2.0),
        (2, "100mbit", 1.0),
    ]
    assert all(line["commit"] and line["date"] for line in kept)
    assert "off by 0.0% in the median" in simulator_error.table(kept)
