"""Program of a host in the lab: host 0 runs the aggregation server with XDP, the others one worker each. Prints JSON.

host.py ROUNDS MODE GUARD [FOLDER]

With a folder, the first server is killed when a worker has put a file there after its second round, and another one is
started. Host 0 then says what was attached to its interface before, between and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.core.counts import Count
from gradwire.net.client import ConnectionOptions
from tests.aggregator.aggregation_job import fragments, submit_all
from tests.schedules import jobs

WORKERS = 3
PORT = 7071
TABLE = IndexTable(4, tuple(range(16)), 8)
STREAMS = Stream(Operation.SUM, 200_000), Stream(Operation.SUM, 50_000, 1), Stream(Operation.MAXIMUM, 2000)
CONFIG = SessionConfig(WORKERS, (TABLE, jobs.WIDE), STREAMS, mtu=1500)


def work(rank: int, rounds: int) -> dict[str, object]:
    found = hashlib.sha256()
    patient = ConnectionOptions(timeout=timedelta(seconds=100))
    client = AggregationClient((os.environ["MASTER_ADDR"], PORT), CONFIG, rank, connection=patient)
    for round_ in range(rounds):
        for out, future in submit_all(client, round_):
            future.result(100)
            found.update(out.tobytes())
        if round_ == 1 and rank == 0 and len(sys.argv) > 4:
            Path(sys.argv[4], "two").touch()
    client.close()
    return {"digest": found.hexdigest(), "fragments": fragments(), **asdict(client.counters)}


def programs() -> list[str]:
    """What of XDP is attached to the interface."""
    shown = json.loads(subprocess.run(["ip", "-j", "link", "show", "eth0"], capture_output=True, check=True).stdout)
    return [name for name in shown[0] if name.startswith("xdp")]


def serve_twice(mode: str, guard: str, folder: Path) -> dict[str, object]:
    command = [
        sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", str(WORKERS), "--port", str(PORT),
        "--host", os.environ["MASTER_ADDR"], "--xdp", "eth0", "--xdp-mode", mode, "--patience", "100",
        *(["--trust-network"] if guard == "crc32c" else []),
    ]  # fmt: skip
    with subprocess.Popen(command) as first:
        while not (folder / "two").exists() and first.poll() is None:
            time.sleep(0.01)
        attached = programs()
        first.kill()
    detached = programs()
    second = subprocess.run(command, capture_output=True, text=True)
    return {"attached": attached, "detached": detached, "said": second.stdout, "after": programs()}


def main() -> None:
    rank, rounds = int(os.environ["RANK"]), int(sys.argv[1])
    if rank:
        print(json.dumps(work(rank - 1, rounds)))
        return
    if len(sys.argv) > 4:
        print(json.dumps(serve_twice(*sys.argv[2:4], Path(sys.argv[4]))))
        return
    options = AggregationOptions(
        WORKERS, os.environ["MASTER_ADDR"], PORT, udp=True, xdp="eth0", xdp_mode=sys.argv[2], guard=sys.argv[3]
    )
    server, said, taken = AggregationServer(options), [], {}

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("Packets:"):
            taken.update({dict(each.labels)["place"]: each.value for each in server.counts() if _is_taken(each)})

    server.run(say)
    print(json.dumps({"said": said, "fragments": fragments(), "taken": taken}))


def _is_taken(count: Count) -> bool:
    return count.name == "packets_total" and ("kind", "taken") in count.labels


if __name__ == "__main__":
    main()
