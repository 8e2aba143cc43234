"""An engine on rank 0, whose peers are bare transports; tests write their frames by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import SyncError
from gradwire.core.events import EventStream
from gradwire.sync.engine import Engine
from gradwire.sync.graph import FrameKey, TaskGraph
from gradwire.wire.frame import FrameKind
from tests.net.memory import MemoryNetwork
from tests.net.recorder import Recorder, body, header, start

PATIENCE = 30.0  # seconds; far longer than anything here takes


class EngineHarness:
    """Rank 0 runs an engine. The other ranks are recorders."""

    def __init__(self, world_size: int, timeout: float, stall_timeout: float, **options: Any) -> None:
        self.network = MemoryNetwork(world_size, timeout=timedelta(seconds=timeout))
        self.peers: dict[int, Recorder] = {
            rank: start(self.network.transports[rank], needs=lambda peer, said_goodbye: False)
            for rank in range(1, world_size)
        }
        self.events = EventStream()
        self.dumps: list[tuple[SyncError, dict[str, Any]]] = []
        options = {"admit": lambda header: None, "on_failure": lambda *found: self.dumps.append(found)} | options
        self._make = lambda: Engine(
            self.network.transports[0],
            events=self.events,
            stall_timeout=timedelta(seconds=stall_timeout),
            **options,
        )
        self.engine: Engine = None  # type: ignore[assignment]

    def begin(self) -> Engine:
        self.engine = self._make()
        return self.engine

    def send(self, peer: int, size: int = 5, **fields: Any) -> np.ndarray:
        """Send a frame of `peer` to the engine, and return its body."""
        transport, content = self.network.transports[peer], body(size, peer)
        transport.send(0, header(transport, **fields), content)
        return content

    def flush(self, peer: int) -> None:
        """Return when everything that `peer` has sent so far has arrived. Frames of one peer arrive in order."""
        number = next(_marks)
        graph, _ = receiving(key(peer, round=number), name="mark")
        self.engine.run(graph)
        self.send(peer, 0, round=number)
        self.engine.wait_idle()


_marks = itertools.count(1 << 40)


@contextmanager
def setup(
    world_size: int = 2, *, timeout: float = 20.0, stall: float = 60.0, **options: Any
) -> Iterator[EngineHarness]:
    made = EngineHarness(world_size, timeout, stall, **options)
    with made.network:
        made.begin()
        try:
            yield made
        finally:
            made.engine.close()


def key(
    peer: int = 1,
    kind: FrameKind = FrameKind.PAYLOAD,
    round: int = 0,
    tensor: int = 0,
    stage: int = 0,
    partition: int = 0,
) -> FrameKey:
    return FrameKey(peer, kind, round, tensor, stage, partition)


def receiving(*keys: FrameKey, name: str = "w", round: int = 0) -> tuple[TaskGraph, dict[FrameKey, bytes]]:
    """Return a graph that waits for frames, and the bodies that its tasks received."""
    got: dict[FrameKey, bytes] = {}
    graph = TaskGraph(name, round, 0, lambda: None)

    def expect(each: FrameKey) -> None:
        task = graph.recv(f"recv stage {each.stage}", each)
        graph.add("decode", "decode", lambda: got.__setitem__(each, task.value.body.tobytes()), [task])

    for each in keys:
        expect(each)
    return graph, got


def computing(*runs: Callable[[], Any], name: str = "w", priority: int = 0, done: Any = None) -> TaskGraph:
    graph = TaskGraph(name, 0, priority, done or (lambda: None))
    for run in runs:
        graph.add("encode", "encode", run)
    return graph


def failure_of(engine: Engine) -> SyncError:
    """Return the error that `wait_idle` raises."""
    with pytest.raises(SyncError) as caught:
        engine.wait_idle()
    return caught.value


def broken() -> None:
    raise ValueError("a bug in a kernel")
