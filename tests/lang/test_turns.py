"""Shared work of processes: each name is done by one process at a time, and every process gets all names."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from gradwire.lang import turns
from gradwire.lang.turns import in_turns

NAMES = ["onebit", "threelc:sparsity=1.75", "threelc"]
pytestmark = pytest.mark.skipif(turns.fcntl is None, reason="there are no file locks here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "folder", lambda kind: tmp_path)


def test_what_another_is_at_comes_last() -> None:
    first, second = in_turns(NAMES), in_turns(NAMES)
    assert next(first) == NAMES[0]  # and holds it
    assert [next(second), next(first)] == [NAMES[1], NAMES[2]]
    ends: list[set[str]] = []
    rest = threading.Thread(target=lambda: ends.append(set(second)))
    rest.start()
    assert list(first) == [NAMES[1]]  # which the other lets go of
    rest.join(20)
    assert ends == [{NAMES[0], NAMES[2]}]


def test_alone_they_come_in_their_order() -> None:
    assert list(in_turns(NAMES)) == NAMES


def hold_first(ready: object) -> None:
    next(work := in_turns(NAMES))
    ready.set()  # type: ignore[attr-defined]
    threading.Event().wait()
    list(work)


def test_who_has_died_or_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=hold_first, args=(ready,))
    other.start()
    assert ready.wait(20) and other.pid is not None
    monkeypatch.setattr(turns, "PATIENCE", timedelta(seconds=0.2))
    os.kill(other.pid, signal.SIGSTOP)
    assert list(in_turns(NAMES)) == [*NAMES[1:], NAMES[0]]
    other.kill()
    other.join()
    assert list(in_turns(NAMES)) == NAMES


def test_without_locks_everybody_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    first = in_turns(NAMES)
    next(first)
    monkeypatch.setattr(turns, "fcntl", None)
    assert list(in_turns(NAMES)) == NAMES
