"""Rows of the times of device code."""

from benchmarks.keys import merged
from benchmarks.planning import device_times
from benchmarks.planning.device_counts import names


def test_a_run_of_some_compressors_leaves_the_parts_of_the_record():
    whole = [*device_times.part_rows({"launch": 1e-5, "memory": 1e12}, names()), {"method": "onebit", "value": 1}]
    assert [row["unit"] for row in whole[:-1]] == ["s", "B/s"]
    other = [*device_times.part_rows({"launch": 2e-5}, ["onebit"]), {"method": "onebit", "value": 2}]
    assert merged(whole, other, device_times.KEY) == [*whole[:-1], other[-1]]
