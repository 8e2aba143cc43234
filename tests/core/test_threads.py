"""Threads: whatever ends one is logged and told, and waiting for the end of one has a limit."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time

import pytest

from gradwire.core import threads
from gradwire.core.errors import PeerLostError, SyncError

WAIT = 20.0


def ended_by(cause: BaseException) -> SyncError:
    """What the owner of a thread is told that `cause` has ended."""

    def run() -> None:
        raise cause

    told: queue.SimpleQueue[SyncError] = queue.SimpleQueue()
    assert threads.end(threads.start("gradwire-test", run, told.put), WAIT)
    return told.get(timeout=WAIT)


@pytest.mark.parametrize("cause", [ValueError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_a_thread_is_logged_and_is_the_cause_of_what_its_owner_is_told(
    cause: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    error = ended_by(cause)
    assert type(error) is SyncError
    assert error.__cause__ is cause
    assert str(error) == f"The thread gradwire-test failed: {cause!r}. The log says where."
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[1] is cause


def test_an_error_that_is_typed_already_is_told_as_it_is() -> None:
    cause = PeerLostError("gone", rank=2)
    assert ended_by(cause) is cause


def test_an_owner_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise ValueError("a bug")

    def on_error(error: SyncError) -> None:
        raise KeyError("another bug")

    assert threads.end(threads.start("gradwire-test", run, on_error), WAIT)
    assert "another bug" in caplog.text


@pytest.mark.parametrize("cause", [ValueError("a bug"), SyncError("a typed error")])
def test_a_thread_that_nobody_waits_for_is_logged_once(cause: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise cause

    assert threads.end(threads.start("gradwire-test", run, on_error=None), WAIT)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None and record.exc_info[1] is cause


def test_a_thread_that_does_not_end_is_left_behind_with_a_word_on_where_it_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on, begun = threading.Event(), time.monotonic()

    def stuck_here() -> None:
        assert go_on.wait(WAIT)

    thread = threads.start("gradwire-test", stuck_here, on_error=None)
    assert not threads.end(thread, 0.1)
    assert time.monotonic() - begun < WAIT / 2
    (record,) = caplog.records
    assert "gradwire-test has not ended within 0.1 s" in record.getMessage()
    assert "stuck_here" in record.getMessage()
    go_on.set()
    assert threads.end(thread, WAIT)


def test_the_limit_begins_again_with_each_progress() -> None:
    go_on = threading.Event()
    thread = threads.start("gradwire-test", lambda: go_on.wait(WAIT), on_error=None)
    steps = itertools.count()

    def progress() -> int:
        step = next(steps)
        if step == 5:
            go_on.set()
        return step

    assert threads.end(thread, 0.05, progress)
    assert next(steps) > 5


def test_a_thread_does_not_wait_for_itself_and_nobody_for_one_that_was_never_started() -> None:
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()
    thread = threads.make("gradwire-test", lambda: found.put(threads.end(thread, WAIT)), on_error=None)
    assert threads.end(thread)
    thread.start()
    assert found.get(timeout=WAIT)
