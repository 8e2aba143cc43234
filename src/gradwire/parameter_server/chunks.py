"""Large parameters in chunks of whole rows, and which server keeps which chunk.

Chunks let the pull of one overlap with the push of the next, and give all servers about the same number of bytes.
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
"""Optimizers of torch.optim that treat each element by itself. Others get parameters in one chunk."""


@dataclass(frozen=True)
class ParameterChunk:
    """Consecutive rows of a parameter, or all of it.

    Attributes:
        parameter: Name of the parameter.
        rows: First row, and the one after the last; None for the whole parameter.
    """

    parameter: str
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.parameter if self.rows is None else f"{self.parameter}[{self.rows[0]}:{self.rows[1]}]"

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """View of these rows in a tensor of the parameter's shape."""
        return values if self.rows is None else values[self.rows[0] : self.rows[1]]


def split(parameters: Mapping[str, torch.Tensor], elements: int) -> list[ParameterChunk]:
    """All parameters, in chunks of about `elements` elements at most. Vectors are not split."""
    chunks: list[ParameterChunk] = []
    for name, values in parameters.items():
        rows = values.shape[0] if values.dim() > 1 else 1
        number = min(rows, math.ceil(values.numel() / elements))
        if number < 2:
            chunks.append(ParameterChunk(name))
        else:
            edges = [round(i * rows / number) for i in range(number + 1)]
            chunks += [ParameterChunk(name, edge) for edge in itertools.pairwise(edges)]
    return chunks


def assign(
    chunks: Sequence[ParameterChunk], parameters: Mapping[str, torch.Tensor], servers: int
) -> list[list[ParameterChunk]]:
    """Chunks of each server. The largest come first, each to the server with the fewest bytes so far."""
    sizes = {chunk: chunk.of(parameters[chunk.parameter]).nbytes for chunk in chunks}
    load = [0] * servers
    home: dict[ParameterChunk, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: (-sizes[chunk], chunk.name)):
        home[chunk] = load.index(min(load))
        load[home[chunk]] += sizes[chunk]
    return [[chunk for chunk in chunks if home[chunk] == server] for server in range(servers)]
