"""Program of a host in the lab: host 0 runs the aggregation server over UDP, the others one worker each. Prints JSON.

aggregation_host.py ROUNDS MTU [multicast]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import Operation, SessionConfig, Stream
from tests.aggregator.aggregation_job import fragments, submit_all
from tests.schedules import jobs

WORKERS = 3
PORT = 7071
GROUP = ("239.71.87.2", 7072)
STREAMS = Stream(Operation.SUM, 200_000), Stream(Operation.MAXIMUM, 2000)


def config(mtu: int) -> SessionConfig:
    """Sums of 16 bits, and norms."""
    return SessionConfig(WORKERS, (jobs.WIDE,), STREAMS, 1024, mtu=mtu)


def work(rank: int, rounds: int, mtu: int) -> dict[str, object]:
    found = hashlib.sha256()
    client = AggregationClient((os.environ["MASTER_ADDR"], PORT), config(mtu), rank)
    for round_ in range(rounds):
        for out, future in submit_all(client, round_):
            future.result(60)
            found.update(out.tobytes())
    client.close()
    return {"digest": found.hexdigest(), "fragments": fragments(), **asdict(client.counters)}


def main() -> None:
    rank, rounds = int(os.environ["RANK"]), int(sys.argv[1])
    if rank:
        print(json.dumps(work(rank - 1, rounds, int(sys.argv[2]))))
        return
    multicast = GROUP if "multicast" in sys.argv else None
    options = AggregationOptions(WORKERS, os.environ["MASTER_ADDR"], PORT, udp=True, multicast=multicast)
    AggregationServer(options).run(lambda text: None)
    print(json.dumps({"fragments": fragments()}))


if __name__ == "__main__":
    main()
