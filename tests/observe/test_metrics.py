"""Metrics: each kind of event goes to its column, and the report is a table and JSON."""

from __future__ import annotations

import json

import pytest

from gradwire.core.events import Event, EventStream
from gradwire.observe.metrics import Metrics, TensorMetrics


def play(events: EventStream) -> None:
    """Emit two steps of one tensor, one of another, and events without a known tensor."""
    for step in range(2):
        events.emit(Event("submit", 0.0, 0.0, "w", step, 4000, detail={"method": "threelc() ring", "elements": 1000}))
        events.emit(Event("encode", 0.0, 0.25, "w"))
        events.emit(Event("merge", 0.0, 0.5, "w"))
        events.emit(Event("decode", 0.0, 0.125, "w"))
        events.emit(Event("send", 0.0, 0.0, "w", nbytes=100, peer=1))
        events.emit(Event("send", 0.0, 0.0, "w", nbytes=100, peer=2))
        events.emit(Event("recv", 0.0, 9.0, "w", nbytes=7777, peer=2))
        events.emit(Event("done", 0.0, 2.0, "w"))
    events.emit(Event("submit", 0.0, 0.0, "b", 2, 40, detail={"method": "none() ring", "elements": 10}))
    events.emit(Event("send", 0.0, 0.0, "b", nbytes=112, peer=1))
    events.emit(Event("done", 0.0, 1.0, "b"))
    events.emit(Event("commit", 0.0))
    events.emit(Event("send", 0.0, 0.0, "never submitted", nbytes=5000))


def test_every_event_lands_in_its_column() -> None:
    events = EventStream()
    metrics = Metrics(events)
    play(events)
    report = metrics.report(1, 3, 2, {"w": 3.0, "b": 4.0, "loaded": 12.0})
    assert report.tensors == {
        "w": TensorMetrics("threelc() ring", 1000, 2, 400, 8000, 1.5, 0.25, 4.0, 3.0),
        "b": TensorMetrics("none() ring", 10, 1, 112, 40, 0.0, 0.0, 1.0, 4.0),
        "loaded": TensorMetrics(residual_norm=12.0),
    }
    assert report.total == TensorMetrics("", 1010, 3, 512, 8040, 1.5, 0.25, 4.0, 13.0)
    assert report.total.ratio == 8040 / 512


def test_the_report_prints_as_a_table_with_figures_per_step() -> None:
    events = EventStream()
    metrics = Metrics(events)
    play(events)
    lines = str(metrics.report(1, 3, 2, {"w": 3.0})).splitlines()
    assert lines[0] == "gradwire on rank 1 of 3, 2 steps (figures per step)"
    assert lines[1].split()[:3] == ["tensor", "method", "elements"]
    expected = ["w", "threelc()", "ring", "1,000", "0.2", "20.0", "750.00", "125.00", "2000.00", "3"]
    assert lines[2].split() == expected
    assert lines[-1].split()[0] == "total"
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"


def test_rows_that_were_not_part_of_every_step_add_up_to_the_total() -> None:
    """With `auto`, or after loading a state, most rows are younger than the job."""
    events = EventStream()
    metrics = Metrics(events)
    for step in range(20):
        same = {"elements": 1000, "members": ["w"]}
        sent = {"method": "DDP's all-reduce", "sent_bytes": 4000, **same}
        name, detail = ("bucket 0", sent) if step < 16 else ("w", {"method": "threelc()", **same})
        events.emit(Event("submit", 0.0, 0.0, name, step, 4000, detail=detail))
        if step >= 16:
            events.emit(Event("send", 0.0, 0.0, name, nbytes=1000, peer=1))
            events.emit(Event("decode", 0.0, 0.05, name))
        events.emit(Event("done", 0.0, 2.0, name))
    events.emit(Event("submit", 0.0, tensor="numbers", detail={"method": "control message", "elements": 0}))
    events.emit(Event("send", 0.0, 0.0, "numbers", nbytes=14_000, peer=1))
    events.emit(Event("done", 0.0, 0.1, "numbers"))
    assert metrics.report(0, 2, 20, {}).total.elements == 1000
    lines = str(metrics.report(0, 2, 20, {})).splitlines()
    column = lines[1].index("kB/step"), lines[1].index("kB/step") + len("kB/step")
    assert [float(line[slice(*column)]) for line in lines[2:]] == [3.2, 0.2, 0.7, 4.1]
    column = lines[1].index("decode ms"), lines[1].index("decode ms") + len("decode ms")
    assert [float(line[slice(*column)]) for line in lines[2:]] == [0, 10, 0, 10]


def test_residuals_of_fused_tensors_are_in_the_last_row_that_they_were_part_of() -> None:
    events = EventStream()
    metrics = Metrics(events)
    for members in (["a", "b"], ["a", "b", "c"]):  # DDP has rebuilt its buckets
        detail = {"method": "threelc()", "elements": 10, "members": members}
        events.emit(Event("submit", 0.0, 0.0, f"a and {len(members) - 1} more", detail=detail))
    report = metrics.report(0, 2, 2, {"a": 3.0, "b": 4.0, "c": 12.0})
    assert {name: row.residual_norm for name, row in report.tensors.items()} == {"a and 1 more": 0, "a and 2 more": 13}
    assert report.total.residual_norm == 13
    assert report.total.elements == report.tensors["a and 2 more"].elements == 10


def test_notes_follow_the_table() -> None:
    report = Metrics(EventStream()).report(0, 2, 0, {})
    report.notes = ["Nothing is compressed."]
    assert str(report).splitlines()[-1] == "Nothing is compressed."
    assert report.as_dict()["notes"] == ["Nothing is compressed."]


def test_a_report_of_nothing_prints_too() -> None:
    report = Metrics(EventStream()).report(0, 1, 0, {})
    assert report.total.ratio == 1.0
    assert "total" in str(report)


def test_the_report_as_a_dict_is_json_and_loses_nothing() -> None:
    events = EventStream()
    metrics = Metrics(events)
    play(events)
    report = metrics.report(1, 3, 2, {"w": 3.0})
    found = json.loads(json.dumps(report.as_dict()))
    assert {key: found[key] for key in ("rank", "world_size", "steps")} == {"rank": 1, "world_size": 3, "steps": 2}
    assert found["tensors"]["w"]["ratio"] == 20.0
    for name, row in found["tensors"].items():
        row.pop("ratio")
        assert TensorMetrics(**row) == report.tensors[name]
    assert found["total"]["sent_bytes"] == 512


def test_a_report_does_not_change_afterward() -> None:
    events = EventStream()
    metrics = Metrics(events)
    play(events)
    report = metrics.report(0, 3, 2, {})
    play(events)
    assert report.tensors["w"].sent_bytes == 400
    assert metrics.report(0, 3, 4, {}).tensors["w"].sent_bytes == 800


def test_closing_ends_the_counting() -> None:
    events = EventStream()
    metrics = Metrics(events)
    metrics.close()
    play(events)
    assert metrics.report(0, 3, 2, {}).tensors == {}


@pytest.mark.parametrize(("dense", "sent", "ratio"), [(100, 50, 2.0), (0, 50, 0.0), (100, 0, 1.0)])
def test_the_ratio_is_dense_over_sent(dense: int, sent: int, ratio: float) -> None:
    assert TensorMetrics(dense_bytes=dense, sent_bytes=sent).ratio == ratio
