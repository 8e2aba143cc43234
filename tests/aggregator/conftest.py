"""Fixtures of the aggregator's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.aggregator.aggregation_job import Job, aggregation_job


@pytest.fixture
def job() -> Iterator[Job]:
    with aggregation_job() as made:
        yield made
