"""How a server ends before its workers have finished: somebody stops it, by a call or by a signal.

Its workers are told why at once. Their jobs end with that, unless the server goes away in a way that lets a successor
take over: then they call for it until their timeouts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gradwire.core.errors import ServerStoppedError
from gradwire.net.reconnecting import ReconnectingEndpoint


class Stoppable:
    """Base of the servers, whose `run` looks at it in every turn."""

    _stopped: ServerStoppedError | None = None
    _for_good = True

    def stop(self, reason: str, *, for_good: bool = True) -> None:
        """Make `run` raise `ServerStoppedError` soon. From any thread, and from the handler of a signal.

        Args:
            reason: why; the workers are told.
            for_good: whether their jobs end with it also where a server that is started again could go on.
        """
        self._for_good = for_good
        self._stopped = ServerStoppedError(reason)

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _tell(self, hub: ReconnectingEndpoint, error: BaseException, *, resumable: bool) -> None:
        """Say to all workers why this ends, and whether a successor could go on."""
        returns = resumable and error is self._stopped and not self._for_good
        hub.close(str(error) or type(error).__name__, for_good=not returns)


@contextmanager
def stopped_by_signals(server: Stoppable) -> Iterator[list[int]]:
    """Let SIGINT stop a server for good, and SIGTERM in a way that lets its successor take over.

    A second signal does what it did before.

    Returns:
        The signals that have come.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        received.append(number)
        name = signal.Signals(number).name
        server.stop(f"The server was stopped by {name}.", for_good=number == signal.SIGINT)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()
