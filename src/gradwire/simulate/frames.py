"""What a frame costs the processor: measured between two ends of the job's own transport, in this process.

The processor's time of the whole process counts, half of it for each end: checksums, copies into the kernel and out of
it, and wake-ups, with nothing else going on. Where network cards do the work of a loopback, frames cost less.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from gradwire.core.errors import SyncError
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks, Transport
from gradwire.planner.costs import LinearCost
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the bodies that are sent."""
_WINDOW = 8  # frames on their way at once
_TIMEOUT = timedelta(seconds=30)


def measure_frame(sizes: Sequence[int] = SIZES, seconds_budget: float = 1.0) -> LinearCost:
    """Seconds of the processor at each end of a frame, by its bytes.

    Args:
        sizes: bytes of the bodies, two at least.
        seconds_budget: about how long this may take.
    """
    with ExitStack() as stack:
        near, far = _pair()
        stack.callback(far.close)
        stack.callback(near.close)
        arrived = threading.Semaphore(0)
        near.start(Callbacks(_admit, lambda peer, header, body: None, _fail))
        far.start(Callbacks(_admit, lambda peer, header, body: arrived.release(), _fail))
        spent = [_seconds(near, arrived, size, seconds_budget / len(sizes)) for size in sizes]
    return LinearCost.fit([HEADER_BYTES + size for size in sizes], spent)


def _pair() -> tuple[TcpTransport, TcpTransport]:
    """Two ranks that meet on loopback."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stores = (store, dist.TCPStore("127.0.0.1", store.port, is_master=False))  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(TcpTransport.connect, stores[rank], rank, 2, timeout=_TIMEOUT, name="profile")
            for rank in range(2)
        ]
        near, far = (end.result() for end in ends)
    return near, far


def _seconds(near: Transport, arrived: threading.Semaphore, size: int, seconds_budget: float) -> float:
    """Of one end, for each frame."""
    body = np.zeros(size, np.uint8)
    _burst(near, arrived, body)  # connections warm up
    began, spent, bursts = time.perf_counter(), time.process_time(), 0
    while bursts == 0 or time.perf_counter() - began < seconds_budget:
        _burst(near, arrived, body)
        bursts += 1
    return (time.process_time() - spent) / (2 * bursts * _WINDOW)


def _burst(near: Transport, arrived: threading.Semaphore, body: np.ndarray) -> None:
    header = Header(FrameKind.PAYLOAD, sender=near.rank, epoch=near.epoch, count=body.nbytes // 4)
    for _ in range(_WINDOW):
        near.send(1, header, body)
    for _ in range(_WINDOW):
        arrived.acquire()


def _admit(peer: int, header: Header) -> None:
    """Everything is expected here."""


def _fail(error: SyncError) -> None:
    raise error
