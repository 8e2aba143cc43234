"""An engine on rank 0, whose peers are bare transports; tests write their frames by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import SyncError
from gradwire.core.events import EventStream
from gradwire.sync.chunk import Chunk
from gradwire.sync.engine import Engine
from gradwire.sync.operations import Draft, FrameFields, FrameKey, Op, Operations, Primitive
from gradwire.sync.run import Run
from gradwire.wire.frame import FrameKind
from tests.net.memory import MemoryNetwork
from tests.net.recorder import Recorder, body, header, start

CHUNK = Chunk(0, 0, 0)
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
        options.setdefault("threads", 1)
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
        self.engine.run(receiving(key(peer), name="mark", round=number)[0])
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


class Script(Draft):
    """Operations that call functions."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = SimpleNamespace()

    def does(
        self,
        function: Callable[..., Any],
        kind: Primitive = "encode",
        phase: str = "",
        inputs: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        peer: int | None = None,
    ) -> int:
        """Call a function with the results of `inputs`."""
        call = f"function_{len(self.ops)}"
        setattr(self._functions, call, lambda chunk, results, stage: function(*results))
        self.ops.append(Op(kind, phase or kind, CHUNK, call, inputs, after, peer=peer))
        return len(self.ops) - 1

    def receives(self, key: FrameKey) -> int:
        chunk = Chunk(key.partition, 0, 0)
        return self.recv_frame(key.peer, key.kind, chunk, key.stage, f"recv stage {key.stage}")

    def run(
        self,
        name: str = "w",
        round: int = 0,
        priority: int = 0,
        tensor: int = 0,
        done: Callable[[], Any] = lambda: None,
        failed: Callable[[SyncError], Any] = lambda error: None,
    ) -> Run:
        run = Run(Operations(self.ops, FrameFields(tensor)), self._functions, name, round, priority)
        run.on_done, run.on_failed = done, failed  # type: ignore[method-assign]
        return run


def key(peer: int = 1, kind: FrameKind = FrameKind.PAYLOAD, stage: int = 0, partition: int = 0) -> FrameKey:
    return FrameKey(peer, kind, stage, 0, 0, partition, 0, 0)


def asking(answer: Future[int] | None = None, name: str = "w", round: int = 0) -> Run:
    """Return a run that waits for a future: `answer`, or one that never ends."""
    script = Script()
    script.does(lambda: answer or Future(), "send", "ask for the sum")
    return script.run(name, round)


def receiving(*keys: FrameKey, name: str = "w", round: int = 0, tensor: int = 0) -> tuple[Run, dict[FrameKey, bytes]]:
    """Return a run that waits for frames, and the bodies that its operations received."""
    got: dict[FrameKey, bytes] = {}
    script = Script()
    for each in keys:
        take = lambda payload, each=each: got.__setitem__(each, payload.body.tobytes())  # noqa: E731
        script.does(take, "decode", inputs=(script.receives(each),))
    return script.run(name, round, tensor=tensor), got


def computing(*functions: Callable[[], Any], priority: int = 0, done: Callable[[], Any] = lambda: None) -> Run:
    script = Script()
    for function in functions:
        script.does(function)
    return script.run(priority=priority, done=done)


def failure_of(engine: Engine) -> SyncError:
    """Return the error that `wait_idle` raises."""
    with pytest.raises(SyncError) as caught:
        engine.wait_idle()
    return caught.value


def broken() -> None:
    raise ValueError("a bug in a kernel")
