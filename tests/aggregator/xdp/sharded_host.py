"""Program of a host in the lab: hosts 0 and 1 add up with XDP, the others run one worker each. Prints JSON.

sharded_host.py ROUNDS MODE
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta

from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.sharded_client import ShardedClient
from gradwire.lab.network import address
from gradwire.net.client import ConnectionOptions
from tests.aggregator.aggregation_job import submit_all
from tests.aggregator.xdp.host import CONFIG, PORT, WORKERS

SERVERS = 2


def main() -> None:
    rank, rounds, mode = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
    if rank < SERVERS:
        said: list[str] = []
        AggregationServer(AggregationOptions(WORKERS, address(rank), PORT, udp=True, xdp="eth0", xdp_mode=mode)).run(
            said.append
        )
        print(json.dumps(said))
        return
    found, patient = hashlib.sha256(), ConnectionOptions(timeout=timedelta(seconds=100))
    servers = [(address(each), PORT) for each in range(SERVERS)]
    client = ShardedClient(servers, CONFIG, rank - SERVERS, connection=patient)
    for round_ in range(rounds):
        for out, future in submit_all(client, round_):
            future.result(100)
            found.update(out.tobytes())
    client.close()
    print(json.dumps(found.hexdigest()))


if __name__ == "__main__":
    main()
