"""The event stream: bounded, and never an obstacle to the data path."""

from __future__ import annotations

import logging
import threading

import pytest

from gradwire.core.events import Event, EventStream


def event(number: int) -> Event:
    return Event("send", float(number), round=number)


def test_the_ring_keeps_the_latest_events_and_no_more() -> None:
    stream = EventStream(capacity=4)
    for number in range(10):
        stream.emit(event(number))
    assert [kept.round for kept in stream.latest()] == [6, 7, 8, 9]


def test_the_default_ring_is_bounded() -> None:
    stream = EventStream()
    for number in range(5000):
        stream.emit(event(number))
    assert len(stream.latest()) == 4096


def test_a_failing_listener_breaks_neither_emit_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    stream, heard = EventStream(), []

    def broken(_: Event) -> None:
        raise RuntimeError("a listener with a bug")

    stream.listen(broken)
    stream.listen(heard.append)
    with caplog.at_level(logging.ERROR, "gradwire"):
        stream.emit(event(1))
    assert [kept.round for kept in heard] == [1]
    assert [kept.round for kept in stream.latest()] == [1]
    assert "a listener with a bug" in caplog.text


def test_a_listener_hears_until_it_is_stopped() -> None:
    stream, first, second = EventStream(), [], []
    stop = stream.listen(first.append)
    stream.listen(second.append)
    stream.emit(event(1))
    stop()
    stop()
    stream.emit(event(2))
    assert [kept.round for kept in first] == [1]
    assert [kept.round for kept in second] == [1, 2]


def test_a_listener_may_stop_itself() -> None:
    stream, heard = EventStream(), []

    def once(heard_event: Event) -> None:
        heard.append(heard_event.round)
        stop()

    stop = stream.listen(once)
    for number in range(3):
        stream.emit(event(number))
    assert heard == [0]


def test_an_event_as_a_dict_has_every_field() -> None:
    found = Event("recv", 1.5, 0.25, "w", 7, 100, 2, {"phase": "recv gather"}).as_dict()
    assert found == {
        "kind": "recv", "start": 1.5, "duration": 0.25, "tensor": "w", "round": 7, "nbytes": 100, "peer": 2,
        "detail": {"phase": "recv gather"},
    }  # fmt: skip


def test_threads_may_emit_and_listen_at_once() -> None:
    stream, heard = EventStream(capacity=100_000), []
    stream.listen(heard.append)

    def work(first: int) -> None:
        for number in range(first, first + 500):
            stream.emit(event(number))
            stream.listen(lambda _: None)()

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(1000 * index + number for index in range(4) for number in range(500))
    assert sorted(kept.round for kept in heard) == expected
    assert sorted(kept.round for kept in stream.latest()) == expected
