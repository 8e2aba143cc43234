"""A job of one worker in the lab beside floods at its listener.

python -m tests.integration.flooded [--steps N]    what each flood costs each listener in steps a second, as CSV
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gradwire.lab import Lab
from tests.integration.flood import LISTENERS

SERVER, WORKER, FLOOD = range(3)
ELSEWHERE, SHARED = "10.78.0.1+200", "10.77.0.2"
"""The flood's addresses: 200 of its own, or that of the worker."""
SECONDS = 60
"""After which a flood ends by itself. It ends with the job otherwise."""
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

    def end(self) -> None:
        """Wait for it to end well."""
        assert self.process.wait(30) == 0, self.process.stderr.read()

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
            assert lab.popen(["ip", *words.split()], host).wait(10) == 0
        yield lab


def flooded(
    listener: str, floods: Sequence[tuple[str, float]], sources: str = ELSEWHERE, *, steps: int = 3, pause: float = 0.0
) -> dict[str, Any]:
    """Start a worker beside floods and return what it prints.

    Args:
        listener: What it connects to; see `tests.integration.flood`.
        floods: ``"connect"`` or ``"send"``, and how often a second.
        sources: `ELSEWHERE` or `SHARED`.
        steps: Number of steps that the worker takes.
        pause: Seconds that the worker takes for each step of a handshake.
    """
    env = {"GRADWIRE_JOB_KEY": secrets.token_hex(32)}
    with network() as lab, contextlib.ExitStack() as stack:

        def start(host: int, *words: object) -> Program:
            made = Program(lab, host, env, *words)
            stack.callback(made.close)
            return made

        server = start(SERVER, "serve", listener)
        assert server.hear() == "ready"
        host = WORKER if sources == SHARED else FLOOD
        running = [start(host, kind, lab.addresses[SERVER], rate, SECONDS, sources) for kind, rate in floods]
        for each in running:
            assert each.hear() == "flooding"
        said: dict[str, Any] = json.loads(start(WORKER, "work", listener, steps, pause).hear())
        assert all(each.process.poll() is None for each in running), "a flood has ended before the worker"
        server.end()
        return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    print("listener,flood,connect_s,steps_per_s")
    for listener in LISTENERS:
        for floods in ([], [("connect", 1500)], [("send", 10_000)]):
            if (floods and listener == "mesh") or (floods[:1] == [("send", 10_000)] and listener != "datagrams"):
                continue  # a mesh closes its listener when it is complete
            said = flooded(listener, floods, steps=steps)
            name = "+".join(f"{kind} {rate}/s" for kind, rate in floods) or "none"
            print(f"{listener},{name},{said['connect_s']:.3f},{steps / said['steps_s']:.1f}", flush=True)


if __name__ == "__main__":
    main()
