"""A case of `test_server.py`, in a network namespace of its own with loopback and an idle interface.

unshare -n python -m tests.aggregator.xdp.alone CASE [ARGUMENT]
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np

from gradwire.aggregator.client import AggregationClient
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.packet import PacketKey, PacketKind, pack
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig, Stream
from gradwire.aggregator.xdp.system import run_program
from gradwire.core.errors import GradwireError
from gradwire.wire.frame import FrameFlags
from tests.aggregator.lost_results import lose_results_and_server
from tests.net.recorder import until
from tests.schedules import jobs
from tests.schedules.kernel import framed

WAIT = 200.0
PORT = 7071
TABLE = IndexTable(4, tuple(range(16)), 8)
CONFIG = SessionConfig(2, (TABLE,), (Stream(Operation.SUM, 40_000, 0), Stream(Operation.MAXIMUM, 5)), 1024)
WIDE = SessionConfig(2, (jobs.WIDE,), (Stream(Operation.SUM, 2048, 0),), 1024)


def serve(*options: str, enter: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", "2", "--port", str(PORT)]
    return subprocess.Popen([*enter, *command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def served(*options: str, enter: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a server, and return when it listens. `enter` is a command that runs it elsewhere."""
    server = serve(*options, enter=enter)
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


def joined(config: SessionConfig = CONFIG, host: str = "127.0.0.1") -> list[AggregationClient]:
    return [AggregationClient((host, PORT), config, rank) for rank in range(config.world_size)]


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


class ServerHost:
    """A host for the server, at the other end of the cable of "idle"."""

    address = "10.9.0.1"

    def __init__(self) -> None:
        os.environ["GRADWIRE_JOB_KEY"] = secrets.token_hex(32)
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", str(2 * WAIT)])
        own, namespace = (f"/proc/{pid}/ns/net" for pid in ("self", self._holder.pid))
        until(lambda: os.readlink(own) != os.readlink(namespace))
        run_ip("addr add 10.9.0.2/24 dev idle")
        run_ip(f"link set other netns {self._holder.pid}")
        self._enter = ["nsenter", f"--net={namespace}"]
        for command in (f"addr add {self.address}/24 dev other", "link set other up", "link set lo up"):
            run_ip(command, self._enter)

    def served(self) -> subprocess.Popen[str]:
        return served("--host", self.address, "--xdp", "other", "--xdp-mode", "generic", enter=self._enter)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait(WAIT)


def refused(host: ServerHost) -> dict[str, object]:
    """Workers with more sums than the kernel has memory, and with more than a map can have; then those of the job."""
    server, said = host.served(), []
    for num_streams in (1, 8):
        config = SessionConfig(2, (TABLE,), num_streams * (Stream(Operation.SUM, 1 << 40),), 1024)
        try:
            AggregationClient((host.address, PORT), config, 0)
        except GradwireError as error:
            said.append(str(error))
    clients = joined(host=host.address)
    work(range(2), clients)
    for client in clients:
        client.close()
    return {"workers": said, "server": server.communicate(timeout=WAIT)[0]}


def restarted(host: ServerHost, first: str) -> dict[str, object]:
    """A server is killed while worker 0 has all results of a round and worker 1 has none. `first` is back first."""
    servers = [host.served()]

    def restart() -> None:
        servers[0].kill()
        servers[0].communicate(timeout=WAIT)
        servers.append(host.served())

    clients = joined(host=host.address)
    work(range(1), clients)
    lacking = lose_results_and_server(clients, 1, int(first), restart)
    for stream, (out, future) in enumerate(lacking):
        future.result(30)
        assert out.tobytes() == jobs.expected(CONFIG, 1, stream, slice(None), [0, 1]).tobytes()
    work(range(2, 4), clients)
    for client in clients:
        client.close()
    return {"server": servers[1].communicate(timeout=WAIT)[0]}


def without_metadata() -> dict[str, object]:
    """A packet with so much metadata that the program can add none, as with a driver that keeps none."""
    options = AggregationOptions(2, port=PORT, udp=True, xdp="idle", xdp_mode="generic", guard="crc32c")
    server, said = AggregationServer(options), {}

    def run() -> None:
        try:
            server.run()
        except GradwireError as error:
            said["server"] = str(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    clients, session = joined(), server._session
    sources = {each.worker: where for where, each in session.datagrams.items()}
    for worker, metadata in ((0, b""), (1, bytes(200))):
        contribution = pack(PacketKind.DATA, PacketKey(0, 0, 0), worker, session.machine.epoch, bytes(512))
        host, port = sources[worker]
        frame = framed(bytes(contribution), worker)
        frame = frame[:26] + socket.inet_aton(host) + frame[30:34] + struct.pack(">H", port) + frame[36:]
        run_program(session.kernel.program, frame, metadata=metadata)
    thread.join(WAIT)
    for client in clients:
        until(lambda client=client: client._error is not None)
        said[f"worker {client.rank}"] = str(client._error)
    return said


def run_ip(command: str, enter: Sequence[str] = ()) -> None:
    subprocess.run([*enter, "ip", *command.split()], check=True)


def main() -> None:
    for command in ("link set lo up", "link add idle type veth peer name other", "link set idle up"):
        run_ip(command)
    os.environ.pop("GRADWIRE_JOB_KEY", None)
    case, *arguments = sys.argv[1:]
    if case in ("refused", "restarted"):
        with contextlib.closing(ServerHost()) as host:
            print(json.dumps(globals()[case](host, *arguments)))
        return
    print(json.dumps(globals()[case]()))


if __name__ == "__main__":
    main()
