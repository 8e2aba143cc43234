"""Worker 0 of two, whose interpreter ends with work in flight: `unfinished parameter_server PORT`, or `aggregator`.

Both functions return what is in flight, which then lives until the interpreter ends.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import gradwire as gw
from gradwire.aggregator.client import AggregationClient
from tests.aggregator.aggregation_job import submit_all
from tests.parameter_server.clients import backward, linear, sgd
from tests.schedules import jobs

LONG = gw.ConnectionOptions(timeout=timedelta(seconds=600))  # longer than the test
JOB = gw.JobOptions(worker=0, workers=2)


def parameter_server(port: int) -> Any:
    """A step is pushed that the other worker has not begun."""
    model = linear()
    address, transfer = f"127.0.0.1:{port}", gw.TransferOptions(min_elements=0)
    client = gw.ParameterClient(model, sgd(model), address, job=JOB, transfer=transfer, connection=LONG)
    backward(model, 0)
    client.step()
    return client


def aggregator(port: int) -> Any:
    """Sums are waited for to which the other worker has not added."""
    client = AggregationClient(("127.0.0.1", port), jobs.config(2), JOB.worker, connection=LONG)
    return client, submit_all(client, 0)


if __name__ == "__main__":
    in_flight = {"parameter_server": parameter_server, "aggregator": aggregator}[sys.argv[1]](int(sys.argv[2]))
