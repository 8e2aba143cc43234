"""Large parameters in pieces of whole rows, and which server keeps which: so that the pull of one piece goes beside
the push of the next, and servers hold as much as each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ELEMENT_WISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Optimizers of torch.optim that treat every element by itself: with others parameters stay whole."""


@dataclass(frozen=True)
class ParameterSlice:
    """Rows of a parameter, or all of it.

    Attributes:
        parameter: its name.
        rows: the first, and the one after the last; None for all.
    """

    parameter: str
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.parameter if self.rows is None else f"{self.parameter}[{self.rows[0]}:{self.rows[1]}]"

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Its part of the parameter, or of a tensor of that shape: a view."""
        return values if self.rows is None else values[self.rows[0] : self.rows[1]]


def cut(parameters: Mapping[str, torch.Tensor], elements: int) -> list[ParameterSlice]:
    """All parameters, in pieces of about so many elements at most where they have rows to cut at."""
    found: list[ParameterSlice] = []
    for name, values in parameters.items():
        rows = values.shape[0] if values.dim() > 1 else 1
        number = min(rows, math.ceil(values.numel() / elements))
        if number < 2:
            found.append(ParameterSlice(name))
        else:
            edges = [round(i * rows / number) for i in range(number + 1)]
            found += [ParameterSlice(name, edge) for edge in itertools.pairwise(edges)]
    return found


def share(
    pieces: Sequence[ParameterSlice], parameters: Mapping[str, torch.Tensor], servers: int
) -> list[list[ParameterSlice]]:
    """The pieces of each server: the largest first, each to the server with the fewest bytes so far."""
    sizes = {piece: piece.of(parameters[piece.parameter]).nbytes for piece in pieces}
    load = [0] * servers
    home: dict[ParameterSlice, int] = {}
    for piece in sorted(pieces, key=lambda piece: (-sizes[piece], piece.name)):
        home[piece] = load.index(min(load))
        load[home[piece]] += sizes[piece]
    return [[piece for piece in pieces if home[piece] == server] for server in range(servers)]
