"""The task graph as data: counts and order."""

from __future__ import annotations

from gradwire.sync.graph import FrameKey, TaskGraph
from gradwire.wire.frame import FrameKind


def diamond() -> TaskGraph:
    graph = TaskGraph("fc.weight", round=3, priority=7, on_done=lambda: None)
    first = graph.add("encode", "encode own", lambda: 1)
    arrived = graph.recv("recv gather", FrameKey(2, FrameKind.PAYLOAD, 3, 0, 1, 0))
    graph.add("send", "send own", lambda: None, [first], peer=1)
    graph.add("merge", "merge both", lambda: None, iter([first, arrived]))
    return graph


def test_a_task_counts_what_it_waits_for_and_knows_what_follows() -> None:
    first, arrived, send, merge = diamond().tasks
    assert [task.pending for task in (first, arrived, send, merge)] == [0, 0, 1, 2]
    assert first.successors == [send, merge]
    assert arrived.successors == [merge]
    assert send.successors == merge.successors == []


def test_the_graph_counts_its_tasks() -> None:
    graph = diamond()
    assert graph.remaining == len(graph.tasks) == 4
    assert all(task.graph is graph for task in graph.tasks)


def test_only_a_recv_waits_for_a_frame_and_it_has_no_code() -> None:
    first, arrived, send, _ = diamond().tasks
    assert (first.key, first.peer) == (None, None)
    assert first.run is not None and first.run() == 1
    assert arrived.run is None
    assert (arrived.key, arrived.peer) == (FrameKey(2, FrameKind.PAYLOAD, 3, 0, 1, 0), 2)
    assert (send.key, send.peer) == (None, 1)


def test_predecessors_are_the_reverse_of_successors() -> None:
    graph = diamond()
    first, arrived, send, merge = graph.tasks
    assert graph.predecessors() == {first: [], arrived: [], send: [first], merge: [first, arrived]}


def test_equal_tasks_are_not_the_same_task() -> None:
    """Dependency counts go by identity: two encodes of the same phase are two tasks."""
    graph = TaskGraph("w", 0, 0, lambda: None)
    run = lambda: None  # noqa: E731
    assert graph.add("encode", "encode", run) != graph.add("encode", "encode", run)
