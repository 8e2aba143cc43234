"""The engine of one rank; its peers are bare transports whose frames the tests write by hand."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import FrameError, PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.memory import MemoryNetwork
from gradwire.sync import engine as engine_module
from gradwire.sync.engine import Engine
from gradwire.sync.graph import FrameKey, TaskGraph
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header
from tests.net.recorder import Recorder, body, header, start, until

PATIENCE = 30.0  # seconds; far beyond what anything here takes


class Setup:
    """Rank 0 runs an engine; the others are recorders."""

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
        """A frame of `peer` to the engine; returns its body."""
        transport, content = self.network.transports[peer], body(size, peer)
        transport.send(0, header(transport, **fields), content)
        return content

    def flush(self, peer: int) -> None:
        """Return once everything that `peer` has sent so far has arrived: frames of one peer arrive in order."""
        number = next(_marks)
        graph, _ = receiving(key(peer, round=number), name="mark")
        self.engine.run(graph)
        self.send(peer, 0, round=number)
        self.engine.wait_idle()


_marks = itertools.count(1 << 40)


@contextmanager
def setup(world_size: int = 2, *, timeout: float = 20.0, stall: float = 60.0, **options: Any) -> Iterator[Setup]:
    made = Setup(world_size, timeout, stall, **options)
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
    """A graph that waits for frames, and the bodies that its tasks got."""
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
    """The error that `wait_idle` raises."""
    with pytest.raises(SyncError) as caught:
        engine.wait_idle()
    return caught.value


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")}


# -- graphs --------------------------------------------------------------------------------------------------------


def test_tasks_run_after_what_they_wait_for_and_done_comes_last() -> None:
    ran: list[str] = []
    graph = TaskGraph("w", 0, 0, lambda: ran.append("done"))
    first = graph.add("encode", "encode", lambda: ran.append("first"))
    second = graph.add("merge", "merge", lambda: ran.append("second"), [first])
    graph.add("decode", "decode", lambda: ran.append("third"), [first, second])
    with setup() as made:
        made.engine.run(graph)
        made.engine.wait_idle()
    assert ran == ["first", "second", "third", "done"]


def test_a_tasks_value_is_what_it_returned() -> None:
    graph = TaskGraph("w", 0, 0, lambda: None)
    first = graph.add("encode", "encode", lambda: 41)
    second = graph.add("merge", "merge", lambda: first.value + 1, [first])
    with setup() as made:
        made.engine.run(graph)
        made.engine.wait_idle()
    assert second.value == 42


def test_sends_go_first_then_the_lowest_priority_number() -> None:
    ran: list[str] = []
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        assert hold.wait(PATIENCE)

    with setup() as made:
        made.engine.run(computing(block))
        assert held.wait(PATIENCE)
        for name, priority in (("late", 9), ("early", 1), ("middle", 5)):
            graph = computing(lambda name=name: ran.append(name), priority=priority)  # type: ignore[misc]
            graph.add("send", "send", lambda name=name: ran.append(f"send {name}"), peer=1)  # type: ignore[misc]
            made.engine.run(graph)
        hold.set()
        made.engine.wait_idle()
    assert ran == ["send early", "send middle", "send late", "early", "middle", "late"]


def test_an_empty_engine_is_idle() -> None:
    with setup() as made:
        made.engine.wait_idle()


# -- frames --------------------------------------------------------------------------------------------------------


def test_a_frame_that_comes_before_its_recv_is_kept() -> None:
    with setup() as made:
        content = made.send(1, 100)
        made.flush(1)
        graph, got = receiving(key())
        made.engine.run(graph)
        made.engine.wait_idle()
    assert got == {key(): content.tobytes()}


def test_every_field_of_the_key_tells_frames_apart() -> None:
    """All frames come early and in another order than they are asked for."""
    keys = [
        key(), key(round=1), key(tensor=1), key(stage=1), key(partition=1), key(kind=FrameKind.STATS),
        key(kind=FrameKind.AGGREGATE), key(2), key(2, round=1),
    ]  # fmt: skip
    with setup(3) as made:
        sent = {}
        for index, each in enumerate(reversed(keys)):
            fields = {name: value for name, value in each._asdict().items() if name != "peer"}
            sent[each] = made.send(each.peer, 10 + index, **fields).tobytes()
        graph, got = receiving(*keys)
        made.engine.run(graph)
        made.engine.wait_idle()
    assert got == sent


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_graph_ends_when_the_last_of_many_frames_has_come(world_size: int) -> None:
    keys = [key(peer, partition=part) for peer in range(1, world_size) for part in range(20)]
    with setup(world_size) as made:
        graph, got = receiving(*keys)
        made.engine.run(graph)
        for each in keys:
            made.send(each.peer, partition=each.partition)
        made.engine.wait_idle()
    assert len(got) == len(keys)


def test_a_frame_that_comes_twice_is_an_error_that_names_its_sender() -> None:
    with setup(3) as made:
        graph, _ = receiving(key(1))
        made.engine.run(graph)
        for _ in range(2):
            made.send(2, round=7)
        error = failure_of(made.engine)
        assert "Expected each frame once" in str(error)
        assert error.rank == 2
        assert made.peers[2].failure().rank == 2


def test_too_many_early_bytes_end_the_engine_and_the_advice_says_why() -> None:
    with setup(early_bytes_limit=1000) as made:
        made.send(1, 500, round=1)
        made.send(1, 500, round=2)
        assert isinstance(made.peers[1].failure(), PeerFailedError)
        error = failure_of(made.engine)
        assert error.rank == 1
        assert "at most a step ahead" in str(error)
        assert "submit the same tensors in the same order on every rank" in str(error)
        assert isinstance(error.__cause__, FrameError)


def test_early_frames_without_a_body_count_by_their_headers() -> None:
    with setup(early_bytes_limit=10 * HEADER_BYTES) as made:
        for number in range(11):
            made.send(1, 0, round=number)
        assert isinstance(made.peers[1].failure(), PeerFailedError)
        assert made.engine.error is not None
        assert "at most a step ahead" in str(made.engine.error)


def test_early_bytes_are_given_back_when_their_recv_comes() -> None:
    with setup(early_bytes_limit=1000) as made:
        for number in range(20):
            made.send(1, 300, round=number)
            made.flush(1)
            graph, got = receiving(key(round=number))
            made.engine.run(graph)
            made.engine.wait_idle()
            assert len(got) == 1


def test_the_limit_holds_for_each_peer_alone() -> None:
    with setup(4, early_bytes_limit=1000) as made:
        for peer in (1, 2, 3):
            made.send(peer, 600, round=1)
            made.flush(peer)
        assert made.engine.error is None


def test_the_limit_given_holds_for_what_waits_before_the_engine_starts() -> None:
    """A quick peer's first frames are there before a slow rank's engine; they may be larger than any default."""
    made = Setup(2, 20.0, 60.0, early_bytes_limit=4 << 20)
    with made.network:
        content = made.send(1, 3 << 20)
        made.begin()
        graph, got = receiving(key())
        made.engine.run(graph)
        made.engine.wait_idle()
        made.engine.close()
    assert got == {key(): content.tobytes()}


def test_a_frame_that_is_not_admitted_ends_both_ends() -> None:
    def admit(found: Header) -> None:
        raise FrameError(f"Expected tensor 0, got {found.tensor}.")

    with setup(admit=admit) as made:
        made.send(1, tensor=3)
        assert "Expected tensor 0, got 3." in str(made.peers[1].failure())
        assert made.engine.error is not None and made.engine.error.rank == 1


# -- failures ------------------------------------------------------------------------------------------------------


def broken() -> None:
    raise ValueError("a bug in a kernel")


def test_an_exception_in_a_task_is_one_typed_error_for_ever() -> None:
    with setup() as made:
        graph = TaskGraph("fc.weight", 4, 0, lambda: None)
        graph.add("send", "send scatter", broken, peer=1)
        made.engine.run(graph)
        error = failure_of(made.engine)
        assert str(error).startswith("ValueError in send scatter of rank 1 (tensor fc.weight, round 4): a bug in a")
        assert (type(error), error.rank, error.tensor, error.phase) == (SyncError, 1, "fc.weight", "send scatter")
        assert isinstance(error.__cause__, ValueError)
        for _ in range(2):
            assert failure_of(made.engine) is error
            with pytest.raises(SyncError) as caught:
                made.engine.run(computing(lambda: None))
            assert caught.value is error
        assert "a bug in a kernel" in str(made.peers[1].failure())


def test_an_exception_in_done_is_a_failure_too() -> None:
    with setup() as made:
        made.engine.run(computing(lambda: None, done=broken))
        error = failure_of(made.engine)
        assert (error.tensor, error.phase) == ("w", "finish")


def test_a_sync_error_of_a_task_is_raised_as_it_is() -> None:
    mine = PeerLostError("gone", rank=1, tensor="w", phase="decode")

    def run() -> None:
        raise mine

    with setup() as made:
        made.engine.run(computing(run))
        assert failure_of(made.engine) is mine


def test_the_peers_know_why_before_the_error_is_raised() -> None:
    """A caller may end its process on the error: who then only sees the connection close would blame this rank."""
    never = threading.Event()

    def slowly(*arguments: Any) -> None:
        never.wait(0.3)  # a last word takes its time on a slow network
        abort(*arguments)

    with setup(3) as made:
        transport = made.network.transports[0]
        abort, transport.abort = transport.abort, slowly  # type: ignore[method-assign]
        made.engine.run(receiving(key(2))[0])
        made.engine.fail(SyncError("rank 2 is to blame", rank=2))
        failure_of(made.engine)
        made.network.kill(0)
        for peer in (1, 2):
            told = made.peers[peer].failure()
            assert isinstance(told, PeerFailedError)
            assert told.rank == 2


def test_nothing_runs_after_a_failure_and_done_is_never_called() -> None:
    ran: list[str] = []
    graph = TaskGraph("w", 0, 0, lambda: ran.append("done"))
    first = graph.add("encode", "encode", broken)
    graph.add("merge", "merge", lambda: ran.append("merge"), [first])
    with setup() as made:
        made.engine.run(graph)
        failure_of(made.engine)
    assert ran == []


@pytest.mark.parametrize("how", ["task", "done", "kill", "leave", "close"])
def test_a_graph_that_does_not_end_well_fails_once(how: str) -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    graph = TaskGraph("w", 0, 0, broken, failed.put)
    if how != "done":
        graph.recv("recv", key())
    graph.add("encode", "encode", broken if how == "task" else lambda: None)
    with setup() as made:
        if how == "leave":
            made.network.transports[1].close()
            until(lambda: made.network.transports[0].departed(1) is not None)
        made.engine.run(graph)
        if how == "kill":
            made.network.kill(1)
        if how == "close":
            made.engine.close()
        error = failed.get(timeout=PATIENCE)
        assert error is made.engine.error or (how == "close" and error.phase == "closed")
    assert failed.empty()


def test_a_callback_that_raises_does_not_keep_others_from_hearing_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    with setup() as made:
        for fail in (lambda error: broken(), failed.put, lambda error: broken()):
            graph = TaskGraph("w", 0, 0, lambda: None, fail)
            graph.recv("recv", key(partition=id(fail)))
            made.engine.run(graph)
        made.engine.fail(SyncError("something"))
        assert "something" in str(failed.get(timeout=PATIENCE))
    assert "could not be told" in caplog.text


def test_only_the_first_failure_counts() -> None:
    with setup() as made:
        first, second = SyncError("first", tensor="w", phase="p"), SyncError("second", tensor="w", phase="p")
        made.engine.fail(first)
        made.engine.fail(second)
        assert made.engine.error is first
        assert [error for error, _ in made.dumps] == [first]


def test_a_failure_is_located_at_what_was_waited_for_of_that_rank() -> None:
    with setup(3) as made:
        for peer, name in ((1, "one"), (2, "two")):
            made.engine.run(receiving(key(peer, tensor=peer, round=5), name=name, round=5)[0])
        made.network.kill(2)
        error = failure_of(made.engine)
        assert isinstance(error, (PeerLostError, PeerFailedError))
        assert (error.rank, error.tensor, error.phase) == (2, "two", "recv stage 0")
        assert "(tensor two, recv stage 0, round 5)" in str(error)


def test_a_failure_between_steps_says_so() -> None:
    with setup() as made:
        made.network.transports[1].abort("out of memory")
        until(lambda: made.engine.error is not None)
        error = failure_of(made.engine)
        assert (error.rank, error.tensor, error.phase) == (1, "none", "between steps")


def test_the_recorder_sees_the_moment_and_may_fail_itself(caplog: pytest.LogCaptureFixture) -> None:
    states: list[dict[str, Any]] = []

    def record(error: SyncError, state: dict[str, Any]) -> None:
        states.append(state)
        raise OSError("no space left")

    with setup(on_failure=record) as made, caplog.at_level(logging.ERROR, "gradwire"):
        made.send(1, 28, round=9)
        made.flush(1)
        made.engine.run(receiving(key(), name="fc.weight")[0])
        made.engine.fail(SyncError("something"))
        error = failure_of(made.engine)
    assert "something" in str(error)
    assert "no space left" in caplog.text
    (state,) = states
    assert state["active"] == ["fc.weight"]
    assert [(row["tensor"], row["phase"], row["rank"], row["round"]) for row in state["waiting"]] == [
        ("fc.weight", "recv stage 0", 1, 0)
    ]
    assert state["early_bytes"] == [0, HEADER_BYTES + 28]
    assert state["received_bytes"] == [0, 2 * HEADER_BYTES + 28]
    assert state["sent_bytes"] == [0, 0]


# -- peers that leave or stall -------------------------------------------------------------------------------------


def test_a_peer_that_closed_in_good_order_with_its_part_missing_is_an_error_at_once() -> None:
    with setup(stall=600.0) as made:
        graph, _ = receiving(key())
        made.engine.run(graph)
        made.network.transports[1].close()
        start_time = time.monotonic()
        error = failure_of(made.engine)
        assert time.monotonic() - start_time < PATIENCE, "not the stall timeout"
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor, error.phase) == (1, "w", "recv stage 0")
        assert "Rank 1 has left the group" in str(error)
        assert "Run the same number of steps on every rank before detach() or the end of the script" in str(error)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_peer_that_left_after_its_part_is_missed_at_the_next_step(how: str) -> None:
    with setup(stall=600.0) as made:
        content = made.send(1, 50)
        getattr(made.network.transports[1], how)()
        graph, got = receiving(key())
        made.engine.run(graph)
        made.engine.wait_idle()
        until(lambda: made.network.transports[0].departed(1) is not None)
        made.engine.wait_idle()
        assert made.engine.error is None
        made.engine.run(receiving(key(round=1), name="next")[0])
        error = failure_of(made.engine)
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor, error.phase) == (1, "next", "recv stage 0")
    assert got == {key(): content.tobytes()}


def asking() -> TaskGraph:
    graph = TaskGraph("w", 0, 0, lambda: None)
    graph.add("send", "ask for the sum", Future)
    return graph


@pytest.mark.parametrize("killed_first", [True, False])
def test_who_is_killed_is_missed_where_an_answer_may_depend_on_it(killed_first: bool) -> None:
    with setup(stall=600.0) as made:
        if not killed_first:
            made.engine.run(asking())
        made.network.kill(1)
        until(lambda: made.network.transports[0].departed(1) is not None)
        if killed_first:
            made.engine.wait_idle()
            made.engine.run(asking())
        error = failure_of(made.engine)
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.tensor) == (1, "w")


def test_who_said_goodbye_is_not_missed_by_who_waits_for_an_answer() -> None:
    answer: Future[int] = Future()
    graph = TaskGraph("w", 0, 0, lambda: None)
    graph.add("send", "ask for the sum", lambda: answer)
    with setup(stall=600.0) as made:
        made.engine.run(graph)
        made.network.transports[1].close()
        until(lambda: made.network.transports[0].departed(1) is not None)
        answer.set_result(5)
        made.engine.wait_idle()


@pytest.mark.parametrize("how", ["close", "kill"])
def test_what_is_left_to_compute_ends_after_a_peer_has_left(how: str) -> None:
    """The others may have all that they need while this rank still decodes; one of three is still waited for."""
    hold, held = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        assert hold.wait(PATIENCE)

    with setup(3, stall=600.0) as made:
        made.send(1, 50)
        graph, got = receiving(key(1), key(2))
        graph.add("decode", "decode", block)
        made.engine.run(graph)
        assert held.wait(PATIENCE)
        getattr(made.network.transports[1], how)()
        until(lambda: made.network.transports[0].departed(1) is not None)
        made.send(2, 50)
        hold.set()
        made.engine.wait_idle()
        assert made.engine.error is None
    assert set(got) == {key(1), key(2)}


def test_a_live_rank_that_does_not_send_is_blamed_after_the_stall_timeout() -> None:
    with setup(3, stall=0.6) as made:
        made.send(1)
        until(lambda: made.network.transports[0].received_bytes[1] > 0)
        graph, _ = receiving(key(1), key(2), name="fc.weight")
        made.engine.run(graph)
        error = failure_of(made.engine)
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.tensor, error.phase) == (2, "fc.weight", "recv stage 0")
        assert "(limit 0.6 s)" in str(error)
        assert "pass a larger stall_timeout" in str(error)
        assert made.peers[1].failure().rank == 2, "the others are told whose fault it is"


def test_who_lacks_a_first_stage_is_blamed_before_who_waits_for_him() -> None:
    """Rank 1 cannot send its merged range while rank 2's part is missing: rank 2 is to blame."""
    with setup(3, stall=0.6) as made:
        made.engine.run(receiving(key(1, stage=1))[0])
        made.engine.run(receiving(key(2, stage=0, tensor=1))[0])
        assert failure_of(made.engine).rank == 2


def test_a_future_that_never_ends_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_ANSWER_GRACE_SECONDS", 0.2)
    graph = TaskGraph("fc.weight", 3, 0, lambda: None)
    graph.add("send", "ask for the sum", Future)
    with setup(stall=0.3) as made:
        made.engine.run(graph)
        error = failure_of(made.engine)
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.tensor, error.phase) == (None, "fc.weight", "ask for the sum")
        assert "Nothing has answered ask for the sum (tensor fc.weight, round 3)" in str(error)
        assert "pass a larger stall_timeout" in str(error)


def test_a_rank_that_lacks_only_a_later_stage_is_blamed_in_the_end() -> None:
    with setup(stall=0.3) as made:
        made.engine.run(receiving(key(1, stage=2))[0])
        assert failure_of(made.engine).rank == 1


# -- the end -------------------------------------------------------------------------------------------------------


def test_no_thread_is_left_after_close() -> None:
    before = engine_threads()
    with setup(3) as made:
        made.engine.run(computing(lambda: None))
        made.engine.wait_idle()
        assert len(engine_threads() - before) == 4
    assert engine_threads() == before


@pytest.mark.parametrize("how", ["task", "kill", "stall"])
def test_no_thread_is_left_after_a_failure(how: str) -> None:
    before = engine_threads()
    with setup(3, stall=0.3) as made:
        made.engine.run(computing(broken) if how == "task" else receiving(key())[0])
        if how == "kill":
            made.network.kill(1)
        failure_of(made.engine)
        made.engine.close()
        left = engine_threads() - before
        assert not any(thread.name in ("gradwire-engine", "gradwire-abort", "gradwire-memory-0") for thread in left)
    assert engine_threads() == before


def test_close_is_idempotent_and_tells_the_peers_goodbye() -> None:
    with setup() as made:
        made.engine.close()
        made.engine.close()
        until(lambda: made.network.transports[1].departed(0))
        assert made.peers[1].failures.empty()


def test_a_closed_engine_takes_no_graph_and_says_what_to_do() -> None:
    with setup() as made:
        made.engine.close()
        with pytest.raises(SyncError, match="make a new one to go on"):
            made.engine.run(computing(lambda: None))
        made.engine.wait_idle()


def test_closing_ends_who_waits_for_a_graph() -> None:
    """Without this, a thread in `wait_idle` would wait for ever."""
    found: list[BaseException | None] = []

    def wait() -> None:
        try:
            made.engine.wait_idle()
            found.append(None)
        except SyncError as error:
            found.append(error)

    with setup() as made:
        made.engine.run(receiving(key())[0])
        waiter = threading.Thread(target=wait)
        waiter.start()
        made.engine.close()
        waiter.join(PATIENCE)
        assert not waiter.is_alive()
        with pytest.raises(SyncError, match=r"wait\(\) for what was submitted before close"):
            made.engine.wait_idle()
    assert [type(error) for error in found] == [SyncError]


# -- events --------------------------------------------------------------------------------------------------------


def test_what_happened_is_in_the_events() -> None:
    with setup() as made:
        graph, _ = receiving(key(round=3), name="fc.weight", round=3)
        made.engine.run(graph)
        made.send(1, 100, round=3)
        made.engine.wait_idle()
        made.engine.fail(SyncError("over", rank=1))
        found = {event.kind: event for event in made.events.latest()}
    assert isinstance(found["recv"], Event)
    assert (found["recv"].tensor, found["recv"].round, found["recv"].peer) == ("fc.weight", 3, 1)
    assert found["recv"].nbytes == HEADER_BYTES + 100
    assert found["recv"].detail == {"phase": "recv stage 0"}
    assert found["decode"].detail == {"phase": "decode"}
    assert found["decode"].duration >= 0
    assert (found["failure"].peer, found["failure"].tensor) == (1, "none")
    assert "over" in found["failure"].detail["message"]
