"""Servers and workers as processes of their own. Nothing here needs torch."""

from __future__ import annotations

import os
from typing import Any

from gradwire.core.errors import GradwireError
from gradwire.net.server import Server, stopped_by_signals
from tests.forks import forks

PATIENCE = 120.0


class Process:
    """One process, and the pipe to it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = forks.Pipe()
        self.process = forks.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, what: str, seconds: float = PATIENCE) -> Any:
        """Wait for a message of this kind and return what it says."""
        heard = []
        while self.pipe.poll(seconds):
            try:
                kind, said = self.pipe.recv()
            except EOFError:
                break
            if kind == what:
                return said
            heard.append((kind, said))
        raise AssertionError(f"no {what} within {seconds} s, but {heard[-3:]}")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(pipe: Any, server: Server) -> None:
    """Serve, and say the port first and the error last."""
    try:
        with stopped_by_signals(server):
            pipe.send(("port", server.address[1]))
            server.run(lambda text: None)
        pipe.send(("ended", ""))
    except GradwireError as error:
        pipe.send(("ended", f"{type(error).__name__}: {error}"))
