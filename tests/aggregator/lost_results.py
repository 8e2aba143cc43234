"""Two workers of which one has all results of a round and the other has none, when they lose their server."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from gradwire.aggregator.client import AggregationClient
from tests.aggregator.aggregation_job import WAIT, submit_all
from tests.net.recorder import until

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)


@contextlib.contextmanager
def deaf(client: AggregationClient) -> Iterator[None]:
    """Let the kernel drop all datagrams to a client. What it sends goes on."""
    sock, code = client._datagrams.socket, ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
    yield
    sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def lose_results_and_server(
    clients: Sequence[AggregationClient], round_: int, first: int, restart: Callable[[], None]
) -> list[tuple[np.ndarray, Future]]:
    """Complete a round whose results only worker 0 hears of, restart the server, and return what worker 1 waits for.

    `first` is the worker that is back first.
    """
    lacking, worker = submit_all(clients[1], round_), clients[1]._worker
    until(lambda: not worker._unsent and not len(worker.window._sent))  # the server holds everything
    before = worker.epoch
    with deaf(clients[1]):
        for _, future in submit_all(clients[0], round_):
            future.result(WAIT)
        with clients[1 - first]._changed:  # without this lock, a client does not note that its connection is lost
            restart()
            until(lambda: clients[first]._worker.epoch != before)
    return lacking
