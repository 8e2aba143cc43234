from __future__ import annotations

import math

import pytest
from benchmarks.intervals import interval


def test_an_interval_of_three_values_is_that_of_a_table_of_students_t():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(2.484, abs=1e-3)


def test_one_value_has_no_interval():
    assert interval([0.25])[0] == 0.25 and math.isnan(interval([0.25])[1])
