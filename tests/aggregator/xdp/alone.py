"""A case of `test_server.py`, in a network namespace of its own with loopback and an idle interface.

unshare -n python -m tests.aggregator.xdp.alone CASE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.core.errors import GradwireError
from gradwire.wire.frame import FrameFlags
from tests.schedules import jobs

WAIT = 200.0
PORT = 7071
TABLE = IndexTable(4, tuple(range(16)), 8)
CONFIG = SessionConfig(2, (TABLE,), (Stream(Operation.SUM, 40_000, 0), Stream(Operation.MAXIMUM, 5)), 1024)
WIDE = SessionConfig(2, (jobs.WIDE,), (Stream(Operation.SUM, 2048, 0),), 1024)


def serve(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", "2", "--port", str(PORT)]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def served(*options: str) -> subprocess.Popen[str]:
    """Start a server, and return when it listens."""
    server = serve(*options)
    line = server.stdout.readline()
    assert line.startswith("Serving"), line + server.stdout.read()
    return server


def work(rounds: range, clients: list[AggregationClient]) -> None:
    for round_ in rounds:
        made = []
        for client in clients:
            for stream, found in enumerate(client.config.streams):
                out = np.empty(found.size, client.config.result_dtype(stream))
                payload = jobs.payload(client.config, client.rank, round_, stream)
                made.append((stream, out, client.submit(round_, stream, payload, out, FrameFlags.USED)))
        for stream, out, future in made:
            future.result(WAIT)
            expected = jobs.expected(clients[0].config, round_, stream, slice(None), [0, 1])
            assert out.tobytes() == expected.tobytes()


def joined(config: SessionConfig = CONFIG) -> list[AggregationClient]:
    return [AggregationClient(("127.0.0.1", PORT), config, rank) for rank in range(config.world_size)]


def taken() -> dict[str, object]:
    """An interface that has a program, the native mode without a driver for it, and a cable that sends for nobody."""
    with served("--xdp", "lo", "--xdp-mode", "generic") as first:
        second = serve("--xdp", "lo", "--xdp-mode", "generic", "--port", "7072").communicate(timeout=WAIT)[0]
        first.terminate()
    native = serve("--xdp", "lo").communicate(timeout=WAIT)[0]
    broadcast = serve("--xdp", "idle", "--xdp-mode", "broadcast").communicate(timeout=WAIT)[0]
    return {"second": second, "native": native, "broadcast": broadcast}


def long_frames() -> dict[str, object]:
    """Sums of 16 bits do not fit frames of 1,500 bytes. The server waits for workers whose sums do."""
    server, said = served("--xdp", "idle", "--xdp-mode", "generic"), {}
    try:
        joined(WIDE)
    except GradwireError as error:
        said = {"worker": str(error), "server ended": server.poll() is not None}
    server.terminate()
    server.communicate(timeout=WAIT)
    return said


def elsewhere() -> dict[str, object]:
    """Workers whose packets do not come through the interface."""
    server = served("--xdp", "idle", "--xdp-mode", "generic", "--trust-network")
    clients = joined()
    try:
        work(range(1), clients)
    except GradwireError as error:
        return {"worker": str(error), "server": server.communicate(timeout=WAIT)[0]}
    return {}


def main() -> None:
    for command in ("link set lo up", "link add idle type veth peer name other", "link set idle up"):
        subprocess.run(["ip", *command.split()], check=True)
    os.environ.pop("GRADWIRE_JOB_KEY", None)
    print(json.dumps(globals()[sys.argv[1]]()))


if __name__ == "__main__":
    main()
