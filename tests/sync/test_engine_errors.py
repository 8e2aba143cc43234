"""Failures of an engine: one typed error everywhere, which names the rank, tensor and phase to blame."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from gradwire.core.errors import PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.core.events import Event
from gradwire.sync import engine as engine_module
from gradwire.sync.engine import Engine
from gradwire.wire.frame import HEADER_BYTES
from tests.net.recorder import until
from tests.sync.engine_harness import PATIENCE, Script, asking, broken, computing, failure_of, key, receiving, setup


def test_an_exception_in_a_task_is_one_typed_error_forever() -> None:
    with setup() as made:
        script = Script()
        script.does(broken, "send", "send scatter", peer=1)
        made.engine.run(script.run("fc.weight", 4))
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


def test_a_sync_error_of_a_task_is_raised_as_it_is() -> None:
    mine = PeerLostError("gone", rank=1, tensor="w", phase="decode")

    def run() -> None:
        raise mine

    with setup() as made:
        made.engine.run(computing(run))
        assert failure_of(made.engine) is mine


def test_the_peers_know_why_before_the_error_is_raised() -> None:
    """A caller may end its process on the error. Peers that only see the connection close would blame this rank."""
    never = threading.Event()

    def slowly(*arguments: Any) -> None:
        never.wait(0.3)  # the message takes a while on a slow network
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


def exit_thread(*arguments: Any) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("where", ["task", "done", "listener"])
def test_whatever_ends_a_thread_of_the_engine_is_one_typed_error_on_every_rank(where: str) -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    script = Script()
    script.does(exit_thread if where == "task" else lambda: None)
    with setup(3) as made:
        if where == "listener":  # only exceptions are kept from the thread there
            made.events.listen(lambda event: exit_thread() if event.kind == "encode" else None)
        waiting = receiving(key(1))[0]
        waiting.on_failed = failed.put  # type: ignore[method-assign]
        made.engine.run(waiting)
        made.engine.run(script.run(round=1, tensor=1, done=exit_thread if where == "done" else lambda: None))
        error = failure_of(made.engine)
        assert type(error) is SyncError
        assert isinstance(error.__cause__, SystemExit)
        assert failed.get(timeout=PATIENCE) is error, "other runs have failed with it"
        for peer in (1, 2):
            assert "SystemExit" in str(made.peers[peer].failure())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_waits_for_no_thread_and_no_lock() -> None:
    """Those of its parent, of which it has none."""
    held, go_on = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        with engine._work:
            held.set()
            go_on.wait(PATIENCE)

    with setup() as made:
        made.engine.run(receiving(key())[0])
        holding = threading.Thread(target=hold, args=[made.engine])
        holding.start()
        assert held.wait(PATIENCE)
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            try:
                made.engine.wait_idle()
            except SyncError as error:
                made.engine.close()
                os._exit("a fork of the one that called attach" not in str(error))
            finally:
                os._exit(2)
        go_on.set()
        holding.join(PATIENCE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert made.engine.error is None


def test_an_operation_that_does_not_end_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for, and the engine's only thread is in the operation."""
    monkeypatch.setattr(engine_module, "FUTURE_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(engine_module, "_LOOK_SECONDS", 0.1)
    go_on = threading.Event()
    with setup(stall=0.3) as made:
        made.engine.run(computing(lambda: go_on.wait(PATIENCE)))
        error = failure_of(made.engine)
        go_on.set()
        assert "No operation of this rank has ended for" in str(error)
        assert "Look for a compressor or a kernel that does not return" in str(error)
        assert (error.rank, error.tensor, error.phase) == (None, "w", "compute")


def test_a_frame_that_is_late_is_noticed_while_all_threads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_LOOK_SECONDS", 0.1)
    go_on, busy = threading.Event(), threading.Event()

    def compute() -> None:
        busy.set()
        go_on.wait(PATIENCE)

    with setup(stall=0.3) as made:
        made.engine.run(receiving(key(1))[0])
        made.engine.run(computing(compute))
        assert busy.wait(PATIENCE)
        error = failure_of(made.engine)
        go_on.set()
        assert (type(error), error.rank) == (PeerTimeoutError, 1)


def test_a_run_that_fails_at_its_end_after_the_engine_has_failed_is_told() -> None:
    """The engine's failure has passed it by, because it counted as ended."""
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    ends, go_on = threading.Event(), threading.Event()

    def done() -> None:
        ends.set()
        assert go_on.wait(PATIENCE)
        broken()

    with setup() as made:
        run = computing(done=done)
        run.on_failed = failed.put  # type: ignore[method-assign]
        made.engine.run(run)
        assert ends.wait(PATIENCE)
        made.engine.fail(SyncError("something"))
        until(lambda: made.peers[1].failure() is not None)  # all runs have been told
        assert failed.empty()
        go_on.set()
        assert "something" in str(failed.get(timeout=PATIENCE))


def test_a_failure_while_the_transport_cannot_be_told_still_fails_the_runs() -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    with setup() as made:
        transport = made.network.transports[0]
        abort, transport.abort = transport.abort, exit_thread  # type: ignore[method-assign]
        run = receiving(key())[0]
        run.on_failed = failed.put  # type: ignore[method-assign]
        made.engine.run(run)
        made.engine.fail(SyncError("something"))
        assert "something" in str(failed.get(timeout=PATIENCE))
        transport.abort = abort  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["caller", "transport"])
@pytest.mark.parametrize("refused", [("gradwire-flight-recorder",), ("gradwire-flight-recorder", "gradwire-abort")])
def test_without_more_threads_a_failure_still_reaches_the_runs_and_the_peers(
    where: str, refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of a container's processes counts threads."""
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    begin = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        begin(thread)

    with setup(3) as made:
        run = receiving(key(2))[0]
        run.on_failed = failed.put  # type: ignore[method-assign]
        made.engine.run(run)
        monkeypatch.setattr(threading.Thread, "start", refusing)
        if where == "caller":
            made.engine.fail(SyncError("Rank 2 is to blame", rank=2))
        else:
            made.network.kill(2)
        assert failed.get(timeout=PATIENCE) is failure_of(made.engine)
        told = made.peers[1].failure()
        assert isinstance(told, PeerFailedError) and told.rank == 2
        assert not made.dumps and "The flight recorder's file is not written" in caplog.text


def test_nothing_runs_after_a_failure_and_done_is_never_called() -> None:
    ran: list[str] = []
    script = Script()
    first = script.does(broken)
    script.does(lambda value: ran.append("merge"), "merge", inputs=(first,))
    with setup() as made:
        made.engine.run(script.run(done=lambda: ran.append("done")))
        failure_of(made.engine)
    assert ran == []


@pytest.mark.parametrize("how", ["task", "done", "kill", "leave", "close"])
def test_a_graph_that_does_not_end_well_fails_once(how: str) -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    script = Script()
    if how != "done":
        script.receives(key())
    script.does(broken if how == "task" else lambda: None)
    with setup() as made:
        if how == "leave":
            made.network.transports[1].close()
            until(lambda: made.network.transports[0].departed(1) is not None)
        made.engine.run(script.run(done=broken, failed=failed.put))
        if how == "kill":
            made.network.kill(1)
        if how == "close":
            made.engine.close()
        error = failed.get(timeout=PATIENCE)
        assert error is made.engine.error or how == "close"
        assert error.phase == {"task": "encode", "done": "finish", "close": "closed"}.get(how, "recv stage 0")
    assert failed.empty()


def test_a_callback_that_raises_does_not_keep_others_from_hearing_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    with setup() as made:
        for round, fail in enumerate((lambda error: broken(), failed.put, lambda error: broken())):
            script = Script()
            script.receives(key())
            made.engine.run(script.run(round=round, failed=fail))
        made.engine.fail(SyncError("something"))
        assert "something" in str(failed.get(timeout=PATIENCE))
    assert "failure callback of w raised" in caplog.text


def test_only_the_first_failure_counts() -> None:
    with setup() as made:
        first, second = SyncError("first", tensor="w", phase="p"), SyncError("second", tensor="w", phase="p")
        made.engine.fail(first)
        made.engine.fail(second)
        assert made.engine.error is first
        assert failure_of(made.engine) is first
        assert [error for error, _ in made.dumps] == [first]


def test_a_failure_is_located_at_what_was_waited_for_of_that_rank() -> None:
    with setup(3) as made:
        for peer, name in ((1, "one"), (2, "two")):
            made.engine.run(receiving(key(peer), name=name, round=4 + peer)[0])
        made.network.kill(2)
        error = failure_of(made.engine)
        assert isinstance(error, (PeerLostError, PeerFailedError))
        assert (error.rank, error.tensor, error.phase) == (2, "two", "recv stage 0")
        assert "(tensor two, recv stage 0, round 6)" in str(error)


def test_a_failure_between_steps_says_so() -> None:
    with setup() as made:
        made.network.transports[1].abort("out of memory")
        until(lambda: made.engine.error is not None)
        error = failure_of(made.engine)
        assert (error.rank, error.tensor, error.phase) == (1, "none", "between steps")
        assert str(error).endswith("(between steps)")


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


def test_a_recorder_that_hangs_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    with setup(on_failure=lambda error, state: release.wait(PATIENCE)) as made:
        start_time = time.monotonic()
        made.engine.run(receiving(key())[0])
        made.engine.fail(SyncError("something"))
        assert "something" in str(failure_of(made.engine))
        assert isinstance(made.peers[1].failure(), PeerFailedError)
        assert time.monotonic() - start_time < PATIENCE / 2
        until(lambda: "gradwire-flight-recorder has not ended" in caplog.text)
        release.set()


def test_a_listener_that_hangs_on_a_failure_holds_up_nobody() -> None:
    """As a trace does on a disk that hangs."""
    failed: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    release, recorded = threading.Event(), threading.Event()
    with setup(on_failure=lambda error, state: recorded.set()) as made:
        made.events.listen(lambda event: release.wait(PATIENCE) if event.kind == "failure" else None)
        run = receiving(key())[0]
        run.on_failed = failed.put  # type: ignore[method-assign]
        made.engine.run(run)
        made.network.kill(1)
        found = failed.get(timeout=PATIENCE / 2)
        assert failure_of(made.engine) is found
        assert recorded.wait(PATIENCE / 2), "nor the flight recorder"
        release.set()


@pytest.mark.parametrize(
    "how", ["early", pytest.param("late", marks=pytest.mark.ci), pytest.param("future", marks=pytest.mark.ci)]
)
def test_a_listener_that_hangs_does_not_hold_the_engine(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the transport's thread, nor on the one that starts a run or answers a request."""
    monkeypatch.setattr(engine_module, "FUTURE_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(engine_module, "_LOOK_SECONDS", 0.1)
    hangs, release = threading.Event(), threading.Event()

    def listen(event: Event) -> None:
        if (event.kind, event.tensor) == ("recv", "w"):
            hangs.set()
            release.wait(PATIENCE)

    def receive() -> None:
        if how == "future":
            made.engine.run(asking(answer))
            answer.set_result(0)
        else:
            made.engine.run(receiving(key())[0])

    answer: Future[int] = Future()
    with setup(stall=2.0) as made:  # enough for what comes before the listener hangs, on a busy machine, too
        made.events.listen(listen)
        if how == "early":
            made.send(1)
            made.flush(1)
        thread = threading.Thread(target=receive)
        thread.start()
        if how == "late":
            thread.join()
            made.send(1)
        assert hangs.wait(PATIENCE)
        error = failure_of(made.engine)
        release.set()
        thread.join()
        assert "No operation of this rank has ended for" in str(error)
