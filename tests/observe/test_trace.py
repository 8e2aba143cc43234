"""Traces: valid JSON in one file per rank, rows without overlaps, the bytes of the report, and bounded memory."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire.observe.trace as trace_module
from gradwire.core.events import Event, EventStream
from gradwire.observe.trace import Trace, path_of
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks


def load(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def rows_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in events:
        if each["ph"] != "M":
            rows[names[each["tid"]]].append(each)
    return rows


def take_steps(one: Synchronizer, steps: range) -> None:
    for step in steps:
        one.begin_step()
        generator = torch.Generator().manual_seed(10 * step + one.rank)
        one.submit([GradientSlice(name, torch.randn(20_000, generator=generator)) for name in ("v", "w")])
        one.commit()


@pytest.mark.parametrize("strategy", ["hierarchical", "scatter_reduce"])
def test_a_run_is_written_as_it_was(tmp_path: Path, strategy: str) -> None:
    def run(one: Synchronizer) -> tuple[Path, Any]:
        with one.trace(tmp_path / "run.json") as trace:
            take_steps(one, range(3))
        report = one.report()
        take_steps(one, range(3, 4))  # not in the trace
        return trace.path, report

    with ranks(3, Plan({"v": "onebit", "w": "int8shared"}, strategy=strategy)) as group:
        found = group.each(run)
    assert [path.name for path, _ in found] == ["run.rank0.json", "run.rank1.json", "run.rank2.json"]
    starts = []
    for rank, (path, report) in enumerate(found):
        events = load(path)
        assert {each["pid"] for each in events} == {rank}
        complete = [each for each in events if each["ph"] == "X"]
        starts.append(min(each["ts"] for each in complete))
        assert {each["cat"] for each in complete} == {"encode", "merge", "decode", "send", "recv", "done"}
        sent = [each["args"] for each in complete if each["cat"] == "send"]
        for name, row in report.tensors.items():
            assert sum(args["bytes"] for args in sent if args["tensor"] == name) == row.sent_bytes
        assert sum(args["bytes"] for args in sent) == report.total.sent_bytes
        assert {args["peer"] for args in sent} == {0, 1, 2} - {rank}
        assert all(each["args"]["bytes"] > 0 for each in complete if each["args"].get("phase") == "encode scatter")
        assert [each["name"] for each in events if each["ph"] == "i"].count("commit") == 3
        rows = rows_of(events)
        assert {"codec", "send", "tensor v", "tensor w"} <= set(rows)
        assert len([each for each in rows["tensor v"] if each["ph"] == "X"]) == 3
        for row in rows.values():
            spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in row if each["ph"] == "X")
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert abs(time.time() * 1e6 - starts[0]) < 120e6, "wall-clock time, so that ranks line up"


def test_every_byte_received_was_sent(tmp_path: Path) -> None:
    with ranks(2, Plan({"v": "onebit", "w": "none"}, strategy="ring")) as group:
        traces = group.each(lambda one: one.trace(tmp_path / "{rank}" / "t.json"))
        group.each(lambda one: take_steps(one, range(2)))
    assert [trace.path for trace in traces] == [tmp_path / "0" / "t.json", tmp_path / "1" / "t.json"]
    events = [each for trace in traces for each in load(trace.path)]  # closed with their synchronizers
    totals = {
        kind: sum(each["args"]["bytes"] for each in events if each.get("cat") == kind) for kind in ("send", "recv")
    }
    assert totals["send"] == totals["recv"] > 0


def test_overlapping_events_go_to_another_row_or_are_cut(tmp_path: Path) -> None:
    stream = EventStream()
    with Trace(stream, tmp_path / "t.json", 0, 2) as trace:
        stream.emit(Event("recv", 1.0, 2.0, "w", 0, 10, 1, {"phase": "recv ring"}))
        stream.emit(Event("recv", 1.0, 3.0, "w", 0, 10, 1, {"phase": "recv ring"}))
        stream.emit(Event("done", 1.0, 4.0, "w", 0))
        stream.emit(Event("done", 2.0, 4.0, "w", 1))
        stream.emit(Event("done", 6.0, 1.0, "w", 2))
    rows = rows_of(load(trace.path))
    first, second = rows["recv from rank 1"]
    assert (first["dur"], second["dur"], second["ts"]) == (2_000_000, 1_000_000, first["ts"] + 2_000_000)
    assert second["args"]["waited_us"] == 3_000_000
    assert [each["args"]["round"] for each in rows["tensor w"]] == [0, 2]
    assert [each["args"].get("round") for each in rows["tensor w (2)"]] == [1]


def test_a_trace_of_a_killed_rank_can_be_read(tmp_path: Path) -> None:
    """Viewers accept an array without its end. A failure flushes everything before it."""
    stream = EventStream()
    trace = Trace(stream, tmp_path / "t.json", 0, 2)
    stream.emit(Event("encode", 1.0, 0.5, "w", 0, 10, detail={"phase": "encode ring"}))
    stream.emit(Event("failure", 2.0, tensor="w", peer=1, detail={"message": "lost"}))
    events = json.loads(trace.path.read_text() + "]")
    assert [each["name"] for each in events if each["ph"] != "M"] == ["encode ring", "failure"]
    trace.close()
    trace.close()
    stream.emit(Event("encode", 3.0, 0.5, "w", 1))
    assert events == load(trace.path)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    stream = EventStream(capacity=10)
    with Trace(stream, tmp_path / "t.json", 0, 2) as trace:
        for number in range(5000):
            stream.emit(Event("send", float(number), 0.5, "w", number, 10, 1))
        held = sum(len(value) for value in vars(trace).values() if isinstance(value, (dict, list)))
    assert held < 10
    assert len(load(trace.path)) > 5000


@pytest.mark.parametrize("num_events", [1, 5000])
def test_a_full_disk_ends_a_trace_with_one_warning(
    num_events: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.rank0.json").symlink_to("/dev/full")
    stream = EventStream()
    with caplog.at_level(logging.WARNING, "gradwire"), Trace(stream, tmp_path / "t.json", 0, 2) as trace:
        for number in range(num_events):
            stream.emit(Event("send", float(number), 0.5, "w", number, 10, 1))
    trace.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage() and str(trace.path) in record.getMessage()


def test_one_file_per_rank() -> None:
    assert path_of("a/t.json", 3) == Path("a/t.rank3.json")
    assert path_of("a/t.json", 3, ".txt") == Path("a/t.rank3.json")
    assert path_of("t", 3, ".json") == Path("t.rank3.json")
    assert path_of("r{rank}/t.json", 3) == Path("r3/t.json")


def test_closing_does_not_wait_forever_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "END_SECONDS", 0.05)
    trace = Trace(EventStream(), tmp_path / "trace.json", 0, 1)
    writing, release = threading.Event(), threading.Event()

    def write() -> None:
        with trace._lock:  # as a write to the disk does
            writing.set()
            release.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    assert writing.wait(30)
    trace.close()
    assert "is left as it is" in caplog.text
    release.set()
    thread.join()
    trace.close()
    assert trace._file.closed
