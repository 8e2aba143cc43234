"""Callbacks that hand everything to queues, so that tests can wait for what they expect."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.transport import Callbacks, Transport
from gradwire.wire.frame import FrameKind, Header

# Generous: on a loaded machine a wait may be long, but what is waited for must come.
PATIENCE = timedelta(seconds=20)


class Recorder:
    """Collects the frames and the failure of one transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.frames: queue.SimpleQueue[tuple[int, Header, np.ndarray]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[SyncError] = queue.SimpleQueue()

    def callbacks(self, admit=lambda peer, header: None, **options: object) -> Callbacks:
        return Callbacks(
            admit=admit,
            deliver=lambda peer, header, body: self.frames.put((peer, header, body)),
            fail=self.failures.put,
            **options,
        )

    def frame(self) -> tuple[int, Header, np.ndarray]:
        return self.frames.get(timeout=PATIENCE.total_seconds())

    def failure(self) -> SyncError:
        return self.failures.get(timeout=PATIENCE.total_seconds())


def start(transport: Transport, **options: object) -> Recorder:
    recorder = Recorder(transport)
    transport.start(recorder.callbacks(**options))
    return recorder


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing announces; fails when it does not come true in time."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.001)


def header(transport: Transport, **fields: object) -> Header:
    return Header(**{"kind": FrameKind.PAYLOAD, "sender": transport.rank, "epoch": transport.epoch, **fields})


def body(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
