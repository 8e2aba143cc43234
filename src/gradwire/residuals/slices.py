"""Values of ranges of one parameter: buffers that are committed, staged and spare, and how these are cut and joined."""
# Shapes: N = elements of a range

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gradwire.core.spec import ElementRange


@dataclass(eq=False)
class ResidualSlice:
    """The buffers of one range. None stands for zeros."""

    committed: np.ndarray | None = None
    staged: np.ndarray | None = None
    spare: np.ndarray | None = None

    def latest(self) -> np.ndarray | None:
        return self.committed if self.staged is None else self.staged


def sum_of(mine: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    if mine is None or other is None:
        return other if mine is None else mine
    total: np.ndarray = mine + other
    return total


def overlap(a: ElementRange, b: ElementRange) -> bool:
    return a.offset < b.end and b.offset < a.end


def intersection(a: ElementRange, b: ElementRange) -> ElementRange:
    start = max(a.offset, b.offset)
    return ElementRange(start, min(a.end, b.end) - start)


def cut(values: np.ndarray, held: ElementRange, wanted: ElementRange) -> np.ndarray:
    """The view of `values`, which lie at `held`, that lies at `wanted`."""
    return values[wanted.offset - held.offset : wanted.end - held.offset]


def join(sources: Iterable[tuple[ElementRange, ResidualSlice]], where: ElementRange) -> ResidualSlice:
    """A piece at `where` with the state and the staged values of `sources`; staged if any of them is."""
    sources = [(held, piece) for held, piece in sources if overlap(held, where)]
    joined = ResidualSlice(_gather([(held, piece.committed) for held, piece in sources], where))
    if any(piece.staged is not None for _, piece in sources):
        staged = _gather([(held, piece.latest()) for held, piece in sources], where)
        joined.staged = np.zeros(where.count, np.float32) if staged is None else staged
    return joined


def _gather(sources: list[tuple[ElementRange, np.ndarray | None]], where: ElementRange) -> np.ndarray | None:
    if all(values is None for _, values in sources):
        return None
    gathered = np.zeros(where.count, np.float32)
    for held, values in sources:
        if values is not None:
            shared = intersection(held, where)
            cut(gathered, where, shared)[:] = cut(values, held, shared)
    return gathered


def any_of(values: np.ndarray | None) -> bool:
    return values is not None and bool(values.any())
