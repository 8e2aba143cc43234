"""Processor time of a frame, measured between two ends of the real transport in this process.

Half of the process's CPU time counts for each end: checksums, copies into and out of the kernel, and wake-ups, on an
otherwise idle machine. Frames cost less where a network card does what the loopback device does here.
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

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks, Transport
from gradwire.planner.curves import LinearCost
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the measured frame bodies."""
_WINDOW = 8  # frames in flight
_TIMEOUT = timedelta(seconds=30)


def measure_frame(sizes: Sequence[int] = SIZES, seconds_budget: float = 1.0) -> LinearCost:
    """Measure the processor seconds of a frame at each end, by its bytes.

    Args:
        sizes: Bytes of the measured bodies, at least two.
        seconds_budget: Approximate time that this may take.
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
    """Connect two ranks over loopback."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stores = (store, dist.TCPStore("127.0.0.1", store.port, is_master=False))  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(TcpTransport.connect, stores[rank], rank, 2, timeout=_TIMEOUT, name="calibration")
            for rank in range(2)
        ]
        near, far = (end.result(2 * _TIMEOUT.total_seconds()) for end in ends)
    return near, far


def _seconds(near: Transport, arrived: threading.Semaphore, size: int, seconds_budget: float) -> float:
    """Processor seconds of one frame at one end."""
    body = np.zeros(size, np.uint8)
    _burst(near, arrived, body)  # warms the connection up
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
        if not arrived.acquire(timeout=_TIMEOUT.total_seconds()):
            raise PeerTimeoutError(f"No frame has crossed loopback within {_TIMEOUT}. The log says why.")


def _admit(peer: int, header: Header) -> None:
    """Accept every frame."""


def _fail(error: SyncError) -> None:
    raise error
