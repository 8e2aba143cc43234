"""A job of one worker in the lab during floods.

python -m tests.integration.flooded [--turns N] [--listeners tls datagrams]

Prints as CSV how many steps a second the worker takes before and during a flood at its own server, from the addresses
of others and from its own, and during the same flood at another server on the server's host. The hosts of the lab share
the cores of one machine, so that the other server shows what a flood takes from the job by its processor time alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from gradwire.lab import Lab
from tests.integration.flood import CERTIFICATES, LISTENERS, PORT
from tests.net.certificates import Authority

SERVER, WORKER, FLOOD = range(3)
ELSEWHERE, SHARED = "10.78.0.1+200", "10.77.0.2"
"""The flood's addresses: 200 of its own, or that of the worker."""
OTHER_PORT = PORT + 1
"""Of a server of the same kind that no worker uses."""
SECONDS = 600
"""After which a flood ends by itself. It ends with the job otherwise."""
PATIENCE = 120
CONNECT, GREET, SEND = ("connect", 1500), ("greet", 1500), ("send", 10_000)
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

    def stop(self) -> Any:
        """Stop a program that goes on until then. Returns its last words."""
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


@contextlib.contextmanager
def environment(lab: Lab) -> Iterator[dict[str, str]]:
    """Variables of the programs of a job: its key, and a folder of certificates."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        authority.files("server", f"IP:{lab.addresses[SERVER]}")
        authority.files("worker")
        yield {"GRADWIRE_JOB_KEY": secrets.token_hex(32), CERTIFICATES: folder}


def flooded(
    listener: str, floods: Sequence[tuple[str, float]], sources: str = ELSEWHERE, *, steps: int = 3, pause: float = 0.0
) -> dict[str, Any]:
    """Start a worker during floods and return what it prints, and what the floods print under ``"floods"``.

    Args:
        listener: What it connects to; see `tests.integration.flood`.
        floods: `CONNECT`, `GREET` and `SEND`, or their kinds with other rates per second.
        sources: `ELSEWHERE` or `SHARED`.
        steps: Number of steps that the worker takes.
        pause: Seconds that the worker takes for each step of a handshake.
    """
    with network() as lab, contextlib.ExitStack() as stack:
        env = stack.enter_context(environment(lab))

        def start(host: int, *words: object) -> Program:
            made = Program(lab, host, env, *words)
            stack.callback(made.close)
            return made

        server = start(SERVER, "serve", listener, PORT)
        assert server.hear() == "ready"
        host = WORKER if sources == SHARED else FLOOD
        running = [start(host, kind, lab.addresses[SERVER], PORT, rate, SECONDS, sources) for kind, rate in floods]
        for each in running:
            assert each.hear() == "flooding"
        said: dict[str, Any] = json.loads(start(WORKER, "work", listener, steps, pause).hear())
        said["floods"] = [each.stop() for each in running]
        server.end()
        return said


_TARGETS = {"own server": (ELSEWHERE, PORT), "own address": (SHARED, PORT), "other server": (ELSEWHERE, OTHER_PORT)}
SETTLED_S, WINDOW_S = 1.0, 5.0


def losses(listener: str, turns: int) -> Iterator[tuple[str, str, float, float]]:
    """What one worker loses to one flood after another: kind, target, steps a second before, and during it."""
    with network() as lab, contextlib.ExitStack() as stack:
        env = stack.enter_context(environment(lab))

        def start(host: int, ready: str, *words: object) -> Program:
            made = Program(lab, host, env, *words)
            stack.callback(made.close)
            assert made.hear() == ready
            return made

        def window() -> tuple[float, float]:
            time.sleep(SETTLED_S + WINDOW_S)
            return time.monotonic() - WINDOW_S, time.monotonic()

        for port in (PORT, OTHER_PORT):
            start(SERVER, "ready", "serve", listener, port)
        worker = start(WORKER, "ready", "pace", listener)
        floods = {"datagrams": [CONNECT, SEND], "tls": [GREET]}.get(listener, [CONNECT])
        found = []
        for (kind, rate), target in list(product(floods, _TARGETS)) * turns:
            sources, port = _TARGETS[target]
            host = WORKER if sources == SHARED else FLOOD
            before = window()
            flood = start(host, "flooding", kind, lab.addresses[SERVER], port, rate, SECONDS, sources)
            found.append((kind, target, before, window()))
            flood.stop()
        ended = worker.stop()
    for kind, target, *windows in found:
        before, during = (sum(since < each <= until for each in ended) / WINDOW_S for since, until in windows)
        yield kind, target, before, during


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--listeners", nargs="+", choices=LISTENERS[1:], default=LISTENERS[1:], metavar="LISTENER")
    given = parser.parse_args()
    print("listener,flood,target,steps_per_s_before,steps_per_s_during")
    for listener in given.listeners:  # no mesh, which closes its listener when it is complete
        for kind, target, before, during in losses(listener, given.turns):
            print(f"{listener},{kind},{target},{before:.1f},{during:.1f}", flush=True)


if __name__ == "__main__":
    main()
