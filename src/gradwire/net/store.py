"""The job's store, with a timeout for each call.

torch's `TCPStore` waits for its server without one: if the store's process is frozen or its machine is cut off, a call
never returns.

On failure: the thread of the unanswered call stays behind, and later calls fail at once.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

from gradwire.core import threads
from gradwire.core.errors import PeerTimeoutError


class BoundedStore:
    """The part of `torch.distributed.Store` that gradwire uses.

    Args:
        store: The job's store.
        timeout: Limit of each call.

    Raises:
        PeerTimeoutError: From every call, once one has taken longer.
    """

    def __init__(self, store: Any, timeout: timedelta) -> None:
        self.underlying_store = store  # the name in torch's own wrappers
        self._timeout = timeout
        self._silent = False

    def set(self, key: str, value: str) -> None:
        self._call(self.underlying_store.set, key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._call(self.underlying_store.get, key)
        return found

    def add(self, key: str, amount: int) -> int:
        found: int = self._call(self.underlying_store.add, key, amount)
        return found

    def check(self, keys: list[str]) -> bool:
        found: bool = self._call(self.underlying_store.check, keys)
        return found

    def delete_key(self, key: str) -> bool:
        found: bool = self._call(self.underlying_store.delete_key, key)
        return found

    def _call(self, function: Any, *arguments: Any) -> Any:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(function(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        if not self._silent:
            threads.start("gradwire-store", run, on_error=None)
            self._silent = not wait([answer], self._timeout.total_seconds()).done
        if self._silent:
            raise PeerTimeoutError(
                f"The job's store has not answered within {self._timeout.total_seconds():g} s. Check whether the "
                "process that holds it, usually rank 0's or the launcher's, is stopped or cut off.",
                phase="rendezvous",
            )
        return answer.result(0)


def receive(store: Any, topic: str, num_readers: int, keys: list[str]) -> None:
    """Count one more reader of `keys`. The last reader deletes them from the store.

    Args:
        store: The job's store.
        topic: Prefix of the readers' shared counter, used once in a job.
        num_readers: Number of readers, each of whom calls this once.
        keys: The keys that they have read.
    """
    if store.add(_receipts(topic), 1) == num_readers:
        for key in [*keys, _receipts(topic)]:
            store.delete_key(key)


def num_received(store: Any, topic: str) -> int:
    """Return how many readers have called `receive`. The last one deletes the counter: ask only before."""
    found: int = store.add(_receipts(topic), 0)
    return found


def _receipts(topic: str) -> str:
    return f"{topic}/read"
