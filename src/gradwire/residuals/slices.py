"""Slices of a parameter's residual: their keys, their committed, staged and spare buffers, and how to cut and join."""
# Shapes: N = elements of a range

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradwire.core.spec import ElementRange

Role = Literal["local", "aggregate", "velocity"]
ROLES: tuple[Role, ...] = ("local", "aggregate")
STORED: tuple[Role, ...] = (*ROLES, "velocity")


@dataclass(frozen=True)
class ResidualKey:
    """Identifies a residual: an element range of a parameter, in one of the roles."""

    name: str
    range: ElementRange
    role: Role = "local"


@dataclass(eq=False)
class ResidualSlice:
    """The buffers of one element range. None stands for zeros.

    Attributes:
        committed: State of the last commit.
        staged: What has been staged since.
        spare: Memory for the next stage.
        twin: The other role's slice of these elements, while this rank encodes them in both roles.
    """

    committed: np.ndarray | None = None
    staged: np.ndarray | None = None
    spare: np.ndarray | None = None
    twin: ResidualSlice | None = None

    def latest(self) -> np.ndarray | None:
        return self.committed if self.staged is None else self.staged


Slices = dict[tuple[str, Role], dict[ElementRange, ResidualSlice]]
"""Slices by parameter name, role and element range."""


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
    """Return the view of the elements `wanted`, where `values` are those of `held`."""
    return values[wanted.offset - held.offset : wanted.end - held.offset]


def join(sources: Iterable[tuple[ElementRange, ResidualSlice]], wanted: ElementRange) -> ResidualSlice:
    """Return a slice of the elements `wanted` with the values of `sources`. It is staged if any source is."""
    sources = [(held, each) for held, each in sources if overlap(held, wanted)]
    joined = ResidualSlice(_gather([(held, each.committed) for held, each in sources], wanted))
    if any(each.staged is not None for _, each in sources):
        staged = _gather([(held, each.latest()) for held, each in sources], wanted)
        joined.staged = np.zeros(wanted.count, np.float32) if staged is None else staged
    return joined


def _gather(sources: list[tuple[ElementRange, np.ndarray | None]], wanted: ElementRange) -> np.ndarray | None:
    if all(values is None for _, values in sources):
        return None
    gathered = np.zeros(wanted.count, np.float32)
    for held, values in sources:
        if values is not None:
            shared = intersection(held, wanted)
            cut(gathered, wanted, shared)[:] = cut(values, held, shared)
    return gathered


def any_of(values: np.ndarray | None) -> bool:
    return values is not None and bool(values.any())
