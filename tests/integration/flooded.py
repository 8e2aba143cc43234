"""A job of one worker in the lab beside floods.

python -m tests.integration.flooded [--steps N] [--runs N]

Prints as CSV how long the worker takes to connect, and how many steps a second it takes, beside a flood at its own
server, from the addresses of others and from its own, and beside the same flood at another server on the server's host.
The hosts of the lab share the cores of one machine, so that the other server shows what the flood takes from the job by
its processor time alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gradwire.lab import Lab
from tests.integration.flood import LISTENERS, PORT

SERVER, WORKER, FLOOD = range(3)
ELSEWHERE, SHARED = "10.78.0.1+200", "10.77.0.2"
"""The flood's addresses: 200 of its own, or that of the worker."""
OTHER_PORT = PORT + 1
SECONDS = 600
"""After which a flood ends by itself. It ends with the job otherwise."""
PATIENCE = 120
CONNECT, SEND = ("connect", 1500), ("send", 10_000)
_PROGRAM = [sys.executable, "-m", "tests.integration.flood"]


class Program:
    """A program on a host."""

    def __init__(self, lab: Lab, host: int, env: dict[str, str], *words: object) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = lab.popen([*_PROGRAM, *map(str, words)], host, env=env, **pipes)

    def hear(self) -> str:
        """Return the next line that it prints."""
        line = self.process.stdout.readline().strip()
        assert line, self.process.stderr.read()
        return line

    def stop(self) -> dict[str, Any]:
        """Stop a flood. Returns its last words."""
        assert self.process.poll() is None, "it has ended before the job"
        self.process.send_signal(signal.SIGTERM)
        return json.loads(self.hear())

    def end(self) -> None:
        """Wait for it to end well."""
        assert self.process.wait(PATIENCE) == 0, self.process.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@contextlib.contextmanager
def network() -> Iterator[Lab]:
    """A server, a worker, and a host that has all addresses of 10.78.0.0/16."""
    with Lab(3, "1gbit") as lab:
        routes = {
            FLOOD: "route add local 10.78.0.0/16 dev lo",
            SERVER: f"route add 10.78.0.0/16 via {lab.addresses[FLOOD]} dev eth0",
        }
        for host, words in routes.items():
            assert lab.popen(["ip", *words.split()], host).wait(PATIENCE) == 0
        yield lab


def flooded(
    listener: str, floods: Sequence[tuple[str, float]], sources: str = ELSEWHERE, *, steps: int = 3,
    pause: float = 0.0, port: int = PORT,
) -> dict[str, Any]:  # fmt: skip
    """Start a worker beside floods and return what it prints, and what the floods print under ``"floods"``.

    Args:
        listener: What it connects to; see `tests.integration.flood`.
        floods: `CONNECT` and `SEND`, or others of their kinds and so many a second.
        sources: `ELSEWHERE` or `SHARED`.
        steps: Number of steps that the worker takes.
        pause: Seconds that the worker takes for each step of a handshake.
        port: Where the floods go: `PORT`, or `OTHER_PORT` for a server of the same kind that no worker uses.
    """
    env = {"GRADWIRE_JOB_KEY": secrets.token_hex(32)}
    with network() as lab, contextlib.ExitStack() as stack:

        def start(host: int, *words: object) -> Program:
            made = Program(lab, host, env, *words)
            stack.callback(made.close)
            return made

        servers = {each: start(SERVER, "serve", listener, each) for each in {PORT, port}}
        for server in servers.values():
            assert server.hear() == "ready"
        host = WORKER if sources == SHARED else FLOOD
        running = [start(host, kind, lab.addresses[SERVER], port, rate, SECONDS, sources) for kind, rate in floods]
        for each in running:
            assert each.hear() == "flooding"
        said: dict[str, Any] = json.loads(start(WORKER, "work", listener, steps, pause).hear())
        said["floods"] = [each.stop() for each in running]
        servers[PORT].end()
        return said


_TARGETS = {"own server": (ELSEWHERE, PORT), "own address": (SHARED, PORT), "other server": (ELSEWHERE, OTHER_PORT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    print("run,listener,flood,target,connect_s,steps_per_s")
    for run in range(options.runs):
        for listener in LISTENERS[1:]:  # a mesh closes its listener when it is complete
            floods = [CONNECT, SEND] if listener == "datagrams" else [CONNECT]
            cases = [("none", [], "", (ELSEWHERE, PORT))]
            cases += [(each[0], [each], name, where) for each in floods for name, where in _TARGETS.items()]
            for name, chosen, target, (sources, port) in cases:
                said = flooded(listener, chosen, sources, steps=options.steps, port=port)
                rate = options.steps / said["steps_s"]
                print(f"{run},{listener},{name},{target},{said['connect_s']:.3f},{rate:.1f}", flush=True)


if __name__ == "__main__":
    main()
