"""The record of the fuzz campaigns: cases count over sittings, and from a failure on, they start over."""

from __future__ import annotations

import math
from pathlib import Path

from tests.fuzz.record import Record


def test_cases_are_counted_over_sittings_and_start_over_after_a_failure(tmp_path: Path) -> None:
    path, targets = tmp_path / "fuzzed.csv", ["frame", "stream"]
    for cases, failures, tried in (
        (100, {}, ["frame", "frame", "stream", "stream"]),
        (150, {"frame"}, ["frame", "stream"]),
        (100, {}, ["frame", "frame"]),
        (150, {}, ["frame"]),
    ):
        record, found = Record(path, "random"), []
        for target in record.due(targets, cases, math.inf):
            found.append(target)
            record.add(target, 50, "it failed\nlike this" if target in failures else "")
        assert found == tried
    last = Record(path, "random")
    assert last.cases == {"frame": 150, "stream": 150}
    assert last.blocks == {"frame": 6, "stream": 3}
    assert not Record(path, "guided").cases, "another campaign"
    assert list(last.due(targets, 1000, -math.inf)) == [], "the time is up"
