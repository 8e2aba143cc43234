"""Lines about events."""

from __future__ import annotations

import threading

import pytest

from gradwire.core import threads
from gradwire.observe import event_lines
from gradwire.observe.event_lines import EventLines


def test_lines_are_written_in_their_order_and_all_of_them() -> None:
    written: list[str] = []
    lines = EventLines(written.append)
    for index in range(1000):
        lines.put(str(index))
    lines.end()
    assert written == [str(index) for index in range(1000)]


def test_an_error_is_logged_and_ends_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[str] = []

    def write(line: str) -> None:
        tried.append(line)
        raise BrokenPipeError("nobody reads")

    lines = EventLines(write)
    for line in ("first", "second"):
        lines.put(line)
    lines.end()
    assert tried == ["first"]
    (record,) = caplog.records
    assert "nobody reads" in record.getMessage()


def test_what_nobody_takes_is_dropped_and_nobody_waits_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_lines, "MAX_LINES", 3)
    monkeypatch.setattr(threads.end, "__defaults__", (0.2, *threads.end.__defaults__[1:]))
    goes_on, written = threading.Event(), []

    def write(line: str) -> None:
        assert goes_on.wait(20)
        written.append(line)

    lines = EventLines(write)
    for index in range(100):
        lines.put(str(index))
    lines.end()
    assert "has not ended within 0.2 s" in caplog.text
    goes_on.set()
    lines._thread.join(0.5)
    assert 3 <= len(written) <= 4
