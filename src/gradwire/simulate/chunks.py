"""Frames that cost the processor time at both ends: handed over by the engine, carried by the transport's thread.

Where carrying is free, a send goes from the engine straight to its channel. Otherwise the engine hands the frame over,
and the transport's thread carries it in pieces, so that a large frame is on the wire while the rest of it is copied.
"""

# Shapes: N = tasks, S = pairs of a task and one that comes after it.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradwire.simulate.loop import HAND, RECV, SEND
from gradwire.simulate.recording import RecordedGraph, Work

CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 64


def num_chunks(nbytes: float) -> int:
    """Pieces of a frame."""
    return int(min(MAX_CHUNKS, max(1, -(-nbytes // CHUNK_BYTES))))


def in_chunks(graph: RecordedGraph, chunks_of: Callable[[Work], int]) -> tuple[RecordedGraph, np.ndarray, np.ndarray]:
    """A graph whose sends are handed over first, and whose sends and recvs are cut into pieces.

    Args:
        graph: as a strategy made it.
        chunks_of: pieces of each send or recv.

    Returns:
        The graph; for each task of `graph`, the first piece of its frame, or itself; and how many pieces (N each).
    """
    is_send, is_recv = graph.kind == SEND, graph.kind == RECV
    pieces = np.array([chunks_of(work) if work.call in ("send", "recv") else 1 for work in graph.works])[graph.work]
    copies = pieces + is_send
    entry = np.concatenate([[0], np.cumsum(copies)[:-1]])
    origin = np.repeat(np.arange(graph.kind.size), copies)
    is_hand = np.zeros(origin.size, np.bool_)
    is_hand[entry[is_send]] = True

    works, work = _works(graph, pieces, origin, is_hand)
    successors_at, successors = _edges(graph, entry, pieces, copies)
    return (
        RecordedGraph(
            works,
            work,
            np.where(is_hand, HAND, graph.kind[origin]),
            np.bincount(successors, minlength=origin.size).astype(np.int64),
            successors_at,
            successors,
            graph.peer[origin],
            graph.part[origin],
            graph.stage[origin],
        ),
        entry + is_send,
        np.where(is_send | is_recv, pieces, 1),
    )


def _works(
    graph: RecordedGraph, pieces: np.ndarray, origin: np.ndarray, is_hand: np.ndarray
) -> tuple[list[Work], np.ndarray]:
    """Every work twice: once as the task itself or the hand-over, once as a piece of its frame."""
    whole = [work._replace(call="hand") if work.call == "send" else work for work in graph.works]
    share = dict(zip(graph.work.tolist(), (1 / pieces).tolist()))
    piece = [work._replace(share=share.get(index, 1.0)) for index, work in enumerate(graph.works)]
    return whole + piece, graph.work[origin] + len(whole) * ~is_hand


def _edges(
    graph: RecordedGraph, entry: np.ndarray, pieces: np.ndarray, copies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What comes after each copy: after a hand-over its pieces, after each piece of a recv what waits for it."""
    is_send, is_recv = graph.kind == SEND, graph.kind == RECV
    after = np.diff(graph.successors_at)
    source = np.repeat(np.arange(graph.kind.size), after)
    target = entry[graph.successors]
    # Edges of the graph itself, once from each piece of a recv, else from the task or the hand-over.
    times = np.where(is_recv, pieces, 1)[source]
    offset = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    sources, targets = np.repeat(entry[source], times) + offset, np.repeat(target, times)
    # Edges from hand-overs to pieces.
    hands = np.repeat(entry[is_send], pieces[is_send])
    count = pieces[is_send]
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    sources, targets = np.concatenate([sources, hands]), np.concatenate([targets, hands + 1 + place])
    order = np.argsort(sources, kind="stable")
    number = np.bincount(sources, minlength=int(copies.sum()))
    return np.concatenate([[0], np.cumsum(number)]).astype(np.int64), targets[order].astype(np.int64)
