"""Program of a host in the lab: host 0 runs the aggregation server over UDP, the others one worker each. Prints JSON.

aggregation_host.py ROUNDS [multicast]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.process import AggregationOptions, AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from tests.schedules import jobs

WORKERS = 3
PORT = 7071
GROUP = ("239.71.87.2", 7072)
CONFIG = SessionConfig(WORKERS, (jobs.WIDE,), (Stream(Operation.SUM, 200_000), Stream(Operation.MAXIMUM, 200)), 1024)


def digest(rounds: int) -> str:
    """Digest of the expected results of all rounds, by a model without a network."""
    found = hashlib.sha256()
    for round_ in range(rounds):
        for stream in range(2):
            found.update(jobs.expected(CONFIG, round_, stream, slice(None), list(range(WORKERS))).tobytes())
    return found.hexdigest()


def work(rank: int, rounds: int) -> dict[str, object]:
    found = hashlib.sha256()
    client = AggregationClient((os.environ["MASTER_ADDR"], PORT), CONFIG, rank)
    for round_ in range(rounds):
        outs = [np.empty(stream.size, CONFIG.result_dtype(index)) for index, stream in enumerate(CONFIG.streams)]
        payloads = [jobs.payload(CONFIG, rank, round_, stream) for stream in range(2)]
        for future in [client.submit(round_, stream, *pair) for stream, pair in enumerate(zip(payloads, outs))]:
            future.result(60)
        for out in outs:
            found.update(out.tobytes())
    client.close()
    return {"digest": found.hexdigest(), **asdict(client.counters)}


def main() -> None:
    rank, rounds = int(os.environ["RANK"]), int(sys.argv[1])
    if rank:
        print(json.dumps(work(rank - 1, rounds)))
        return
    multicast = GROUP if "multicast" in sys.argv else None
    options = AggregationOptions(WORKERS, os.environ["MASTER_ADDR"], PORT, udp=True, multicast=multicast)
    AggregationServer(options).run(lambda text: None)


if __name__ == "__main__":
    main()
