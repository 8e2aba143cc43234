"""The engine of one rank: order of operations, frames before and after their `recv`, events, and the end."""

from __future__ import annotations

import itertools
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta

import pytest

from gradwire.core.errors import FrameError, PeerFailedError, SyncError
from gradwire.core.events import Event, EventStream
from gradwire.sync.engine import Engine
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header
from gradwire.wire.payload import Payload
from tests.net.group import connect_all
from tests.net.recorder import body, start, until
from tests.sync.engine_harness import (
    CHUNK,
    PATIENCE,
    EngineHarness,
    Script,
    broken,
    computing,
    failure_of,
    key,
    receiving,
    setup,
)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")}


# -- runs --------------------------------------------------------------------------------------------------------


def test_operations_run_in_order_with_the_results_of_those_before_and_done_comes_last() -> None:
    ran: list[str] = []
    script = Script()
    first = script.does(lambda: ran.append("first") or "value")
    second = script.does(lambda value: ran.append(f"second, after {value}"), "merge", inputs=(first,))
    script.does(lambda: ran.append("third"), "decode", after=(first, second))
    with setup() as made:
        made.engine.run(script.run(done=lambda: ran.append("done")))
        made.engine.wait_idle()
    assert ran == ["first", "second, after value", "third", "done"]


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
            script = Script()
            script.does(lambda name=name: ran.append(name))
            script.does(lambda name=name: ran.append(f"send {name}"), "send", peer=1)
            made.engine.run(script.run(priority=priority))
        hold.set()
        made.engine.wait_idle()
    assert ran == ["send early", "send middle", "send late", "early", "middle", "late"]


def test_several_threads_compute_side_by_side() -> None:
    """Each waits for the other, and both for a third that is sent first."""
    together, ran = threading.Barrier(3), []

    def meet() -> None:
        together.wait(PATIENCE)
        ran.append(threading.current_thread().name)

    with setup(threads=3) as made:
        made.engine.run(computing(meet, meet))
        made.engine.run(computing(meet, priority=1))
        made.engine.wait_idle()
    assert sorted(ran) == ["gradwire-engine-0", "gradwire-engine-1", "gradwire-engine-2"]


def test_an_error_on_one_of_several_threads_ends_all() -> None:
    with setup(threads=3) as made:
        made.engine.run(computing(*[lambda: None] * 20, broken, *[lambda: None] * 20))
        assert "a bug in a kernel" in str(failure_of(made.engine))
        made.engine.close()
        assert not any(thread.name.startswith("gradwire-engine") for thread in engine_threads())


# -- frames --------------------------------------------------------------------------------------------------------


def test_a_result_is_kept_until_its_last_user_has_ended() -> None:
    """What is received or encoded is large, and a run may wait for other ranks long after it is decoded."""
    script, seen = Script(), []
    first = script.does(lambda: "value")
    script.does(lambda value: seen.append(list(run.results)), "merge", inputs=(first,))
    script.does(lambda value: seen.append(list(run.results)), "decode", inputs=(first,), after=(1,))
    script.does(lambda: seen.append(list(run.results)), "decode", after=(2,))
    run = script.run()
    with setup() as made:
        made.engine.run(run)
        made.engine.wait_idle()
    assert [results[0] for results in seen] == ["value", "value", None]


def test_a_run_ends_only_when_memory_that_it_lends_is_free() -> None:
    ours, theirs = connect_all(2)
    harness = {"admit": lambda header: None, "events": EventStream(), "on_failure": lambda *found: None}
    engine = Engine(ours, stall_timeout=timedelta(seconds=PATIENCE), threads=1, **harness)
    script, done = Script(), threading.Event()
    mine = script.does(lambda: Payload(body(50_000_000)))
    script.send_frame(mine, 1, FrameKind.PAYLOAD, CHUNK, 0, "send")
    run = script.run(done=done.set)
    run.lends = lambda payload: True  # type: ignore[method-assign]
    engine.run(run)
    until(lambda: ours.sent_bytes[1] > 0)
    assert not engine.idle and not done.is_set()  # the kernel does not take so much while nothing is read
    start(theirs)
    engine.wait_idle()
    assert done.is_set()
    engine.close()
    theirs.close()


@pytest.mark.parametrize("how", ["lost", "stalled"])
def test_a_peer_that_does_not_take_lent_memory_ends_the_engine(how: str) -> None:
    """The run waits for nothing else, and would not end otherwise."""
    ours, theirs = connect_all(2)
    harness = {"admit": lambda header: None, "events": EventStream(), "on_failure": lambda *found: None}
    stall = timedelta(seconds=0.5 if how == "stalled" else 600)
    engine = Engine(ours, stall_timeout=stall, threads=1, **harness)
    script = Script()
    mine = script.does(lambda: Payload(body(50_000_000)))
    script.send_frame(mine, 1, FrameKind.PAYLOAD, CHUNK, 0, "send")
    run = script.run()
    run.lends = lambda payload: True  # type: ignore[method-assign]
    engine.run(run)
    until(lambda: ours.sent_bytes[1] > 0)
    if how == "lost":
        theirs._links[0].socket.shutdown(socket.SHUT_RDWR)
    error = failure_of(engine)
    assert (error.rank, error.tensor, error.phase) == (1, "w", "send")
    if how == "stalled":
        assert "Rank 1 is alive, but has not taken a frame from this rank" in str(error)
    engine.close()
    theirs.close()


def test_a_run_starts_when_its_gradients_are_there() -> None:
    """Frames for it may come before, as for any run that has not begun."""
    loading: Future[None] = Future()
    run, got = receiving(key())
    with setup() as made:
        made.engine.run(run, loading)
        content = made.send(1)
        until(lambda: made.network.transports[0].received_bytes[1] > 0)
        assert not got and not made.engine.idle
        loading.set_result(None)
        made.engine.wait_idle()
    assert got == {key(): content.tobytes()}


def test_a_copy_that_fails_ends_the_engine() -> None:
    loading: Future[None] = Future()
    with setup() as made:
        made.engine.run(receiving(key(), name="fc.weight")[0], loading)
        loading.set_exception(RuntimeError("the device is lost"))
        assert "RuntimeError in load (tensor fc.weight, round 0): the device is lost" in str(failure_of(made.engine))


def test_every_field_of_the_header_tells_frames_apart() -> None:
    """All frames come early and in another order than they are asked for."""
    keys = [key(), key(stage=1), key(partition=1), key(kind=FrameKind.STATS), key(kind=FrameKind.AGGREGATE), key(2)]
    with setup(3) as made:
        sent = {}
        for index, (round, each) in enumerate(reversed(list(itertools.product(range(3), keys)))):
            fields = {name: getattr(each, name) for name in ("kind", "stage", "partition")}
            content = made.send(each.peer, 10 + index, round=round, **fields)
            sent[round, each] = content.tobytes()
        found = {}
        for round in range(3):
            run, got = receiving(*keys, round=round)
            made.engine.run(run)
            made.engine.wait_idle()
            found |= {(round, each): content for each, content in got.items()}
    assert found == sent


@pytest.mark.parametrize("field", ["tensor", "offset", "count", "members"])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_frame_of_other_tensors_is_refused_at_once(field: str, is_early: bool) -> None:
    with setup() as made:
        if is_early:
            made.send(1, **{field: 1})
        made.engine.run(receiving(key(), name="w")[0])
        if not is_early:
            made.send(1, **{field: 1})
        assert "Rank 1 sent something else than a part of w that this rank waits for" in str(failure_of(made.engine))


def test_a_run_ends_when_the_last_of_many_frames_has_come() -> None:
    keys = [key(peer, partition=chunk) for peer in range(1, 5) for chunk in range(20)]
    with setup(5) as made:
        run, got = receiving(*keys)
        made.engine.run(run)
        for each in keys:
            made.send(each.peer, partition=each.partition)
        made.engine.wait_idle()
    assert len(got) == len(keys)


@pytest.mark.parametrize("early", [True, False])
def test_a_frame_that_comes_twice_is_an_error_that_names_its_sender(early: bool) -> None:
    with setup(3) as made:
        made.engine.run(receiving(key(1), key(2), round=0 if early else 7)[0])
        for _ in range(2):
            made.send(2, round=7)
        error = failure_of(made.engine)
        assert "Rank 2 sent a frame twice: PAYLOAD of tensor number 0, partition 0, stage 0, round 7." in str(error)
        assert "Run one gradwire version on all ranks" in str(error)
        assert error.rank == 2
        assert made.peers[2].failure().rank == 2


@pytest.mark.parametrize("early", [True, False])
def test_a_frame_that_a_run_does_not_wait_for_is_an_error_that_names_its_sender(early: bool) -> None:
    """As when ranks submit the same tensors in other calls."""
    with setup(3) as made:
        if early:
            made.send(2, partition=5)
            made.flush(2)
        made.engine.run(receiving(key(1), key(2))[0])
        if not early:
            made.send(2, partition=5)
        error = failure_of(made.engine)
        assert "Rank 2 sent something else than a part of" in str(error)
        assert "Make the same gradwire calls on every rank, with the same tensors in the same order." in str(error)
        assert error.rank == 2


@pytest.mark.parametrize(("limit", "size", "count"), [(1000, 500, 2), (10 * HEADER_BYTES, 0, 11)])
def test_too_many_early_bytes_end_the_engine_and_the_advice_says_why(limit: int, size: int, count: int) -> None:
    """Frames without a body count by their headers."""
    with setup(early_bytes_limit=limit) as made:
        for number in range(count):
            made.send(1, size, round=number)
        assert isinstance(made.peers[1].failure(), PeerFailedError)
        error = failure_of(made.engine)
        assert error.rank == 1
        assert "Rank 1 is more than a step ahead" in str(error)
        assert "Submit the same tensors in the same order on every rank." in str(error)
        assert isinstance(error.__cause__, FrameError)


def test_early_bytes_no_longer_count_once_their_recv_exists() -> None:
    with setup(early_bytes_limit=1000) as made:
        for number in range(20):
            made.send(1, 300, round=number)
            made.flush(1)
            run, got = receiving(key(), round=number)
            made.engine.run(run)
            made.engine.wait_idle()
            assert len(got) == 1


def test_the_limit_holds_for_each_peer_alone() -> None:
    with setup(4, early_bytes_limit=1000) as made:
        for peer in (1, 2, 3):
            made.send(peer, 600, round=1)
            made.flush(peer)
        assert made.engine.error is None


def test_the_limit_given_holds_for_what_waits_before_the_engine_starts() -> None:
    """A fast peer's first frames may come before a slow rank's engine, and exceed any default limit."""
    made = EngineHarness(2, 20.0, 60.0, early_bytes_limit=4 << 20)
    with made.network:
        content = made.send(1, 3 << 20)
        made.begin()
        run, got = receiving(key())
        made.engine.run(run)
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
        assert not any(thread.name in ("gradwire-engine-0", "gradwire-abort", "gradwire-memory-0") for thread in left)
    assert engine_threads() == before


def test_close_is_idempotent_and_graceful() -> None:
    with setup() as made:
        made.engine.close()
        made.engine.close()
        until(lambda: made.network.transports[1].departed(0))
        assert made.peers[1].failures.empty()


def test_a_closed_engine_takes_no_run_and_says_what_to_do() -> None:
    with setup() as made:
        made.engine.close()
        with pytest.raises(SyncError, match="make a new one to go on"):
            made.engine.run(computing(lambda: None))
        made.engine.wait_idle()


def test_closing_ends_threads_that_wait_for_a_run() -> None:
    """Otherwise, a thread in `wait_idle` would wait forever."""
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
        with pytest.raises(SyncError, match=r"Call wait\(\) for everything submitted before close"):
            made.engine.wait_idle()
    assert [type(error) for error in found] == [SyncError]


# -- events --------------------------------------------------------------------------------------------------------


def test_what_happened_is_in_the_events() -> None:
    with setup() as made:
        run, _ = receiving(key(), name="fc.weight", round=3)
        made.engine.run(run)
        made.send(1, 100, round=3)
        made.engine.wait_idle()
        made.engine.fail(SyncError("over", rank=1))
        failure_of(made.engine)
        found = {event.kind: event for event in made.events.latest()}
    assert isinstance(found["recv"], Event)
    assert (found["recv"].tensor, found["recv"].round, found["recv"].peer) == ("fc.weight", 3, 1)
    assert found["recv"].nbytes == HEADER_BYTES + 100
    assert found["recv"].detail == {"phase": "recv stage 0"}
    assert found["decode"].detail == {"phase": "decode"}
    assert found["decode"].duration >= 0
    assert (found["failure"].peer, found["failure"].tensor) == (1, "none")
    assert "over" in found["failure"].detail["message"]
