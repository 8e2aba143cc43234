"""Frames that cost processor time by their size: the engine hands them over, the transport's thread carries them.

Where carrying is free, a send goes from the engine straight to its channel. Otherwise the transport's thread carries
the frame in fragments, so that a large frame is on the wire while the rest of it is still being copied.
"""

# Shapes: N = tasks, S = pairs of a task and a successor.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradwire.simulate.graphs import RankGraph, Work
from gradwire.simulate.loop import HAND, RECV, SEND

FRAGMENT_BYTES = 256 * 1024
MAX_FRAGMENTS = 64


def num_fragments(nbytes: float) -> int:
    """Number of fragments of a frame."""
    return int(min(MAX_FRAGMENTS, max(1, -(-nbytes // FRAGMENT_BYTES))))


def in_fragments(graph: RankGraph, fragments_of: Callable[[Work], int]) -> tuple[RankGraph, np.ndarray, np.ndarray]:
    """Cut sends and recvs into fragments, and hand every send over first.

    Args:
        graph: Graph as the strategy built it.
        fragments_of: Number of fragments of a send or recv.

    Returns:
        The new graph; for each task of `graph`, its first fragment, or the task itself (N); and its number of fragments
        (N).
    """
    is_send, is_recv = graph.kind == SEND, graph.kind == RECV
    counts = np.array([fragments_of(work) if work.call in ("send", "recv") else 1 for work in graph.works])[graph.work]
    copies = counts + is_send
    entry = np.concatenate([[0], np.cumsum(copies)[:-1]])
    origin = np.repeat(np.arange(graph.kind.size), copies)
    is_hand = np.zeros(origin.size, np.bool_)
    is_hand[entry[is_send]] = True

    works, work = _works(graph, counts, origin, is_hand)
    successors_at, successors = _edges(graph, entry, counts, copies)
    cut = RankGraph(
        works,
        work,
        kind=np.where(is_hand, HAND, graph.kind[origin]),
        pending=np.bincount(successors, minlength=origin.size).astype(np.int64),
        successors_at=successors_at,
        successors=successors,
        peer=graph.peer[origin],
        chunk=graph.chunk[origin],
        stage=graph.stage[origin],
    )
    return cut, entry + is_send, np.where(is_send | is_recv, counts, 1)


def _works(
    graph: RankGraph, counts: np.ndarray, origin: np.ndarray, is_hand: np.ndarray
) -> tuple[list[Work], np.ndarray]:
    """Every work twice: once as the task itself or the hand-over, once as a fragment of its frame."""
    tasks = [work._replace(call="hand") if work.call == "send" else work for work in graph.works]
    share = dict(zip(graph.work.tolist(), (1 / counts).tolist()))
    fragments = [work._replace(share=share.get(index, 1.0)) for index, work in enumerate(graph.works)]
    return tasks + fragments, graph.work[origin] + len(tasks) * ~is_hand


def _edges(
    graph: RankGraph, entry: np.ndarray, counts: np.ndarray, copies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Successors of each copy: fragments follow a hand-over, and what waits for a recv follows each fragment of it."""
    is_send, is_recv = graph.kind == SEND, graph.kind == RECV
    source = np.repeat(np.arange(graph.kind.size), np.diff(graph.successors_at))
    target = entry[graph.successors]
    # Edges of the graph itself: one from each fragment of a recv, otherwise from the task or the hand-over.
    times = np.where(is_recv, counts, 1)[source]
    sources, targets = np.repeat(entry[source], times) + offsets(times), np.repeat(target, times)
    # Edges from hand-overs to fragments.
    sent = counts[is_send]
    hands = np.repeat(entry[is_send], sent)
    sources = np.concatenate([sources, hands])
    targets = np.concatenate([targets, hands + 1 + offsets(sent)])
    order = np.argsort(sources, kind="stable")
    number = np.bincount(sources, minlength=int(copies.sum()))
    return np.concatenate([[0], np.cumsum(number)]).astype(np.int64), targets[order].astype(np.int64)


def offsets(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after another."""
    found: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return found
