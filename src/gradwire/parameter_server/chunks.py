"""The chunks of a model that travel by themselves, and which server keeps which chunk.

A large parameter is cut into chunks of whole rows: the pull of one overlaps with the push of the next, and all servers
get about the same number of bytes. Vectors that are next to each other are joined to one chunk: they are sent as they
are, and most of the time of a small tensor is not for its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.core.errors import AttachError

ELEMENT_WISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Optimizers of torch.optim that treat each element by itself. Others get parameters in one chunk."""

Tensors = Mapping[str, torch.Tensor]
"""Tensors of the parameters' shapes, by name of the parameter."""


@dataclass(frozen=True)
class ParameterChunk:
    """Consecutive rows of a parameter, all of it, or several vectors, one after another.

    Attributes:
        parameters: Names of the parameters.
        rows: First row, and the one after the last; None for whole parameters.
    """

    parameters: tuple[str, ...]
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        first, *others = self.parameters
        if others:
            return f"{first} to {others[-1]}"
        return first if self.rows is None else f"{first}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def is_joined(self) -> bool:
        return len(self.parameters) > 1

    def of(self, tensors: Tensors) -> torch.Tensor:
        """The elements of this chunk: a view of one tensor, or a copy of several."""
        if self.is_joined:
            return torch.cat([tensors[name].detach() for name in self.parameters])
        values = tensors[self.parameters[0]]
        return values if self.rows is None else values[self.rows[0] : self.rows[1]]

    def write(self, values: torch.Tensor, tensors: Tensors) -> None:
        """Write elements that `of` has returned, or others of this shape, to the tensors."""
        if self.is_joined:
            own = [tensors[name] for name in self.parameters]
            torch._foreach_copy_(own, list(torch.split(values, [each.numel() for each in own])))
        else:
            self.of(tensors).copy_(values.view(self.of(tensors).shape))

    def is_complete(self, names: Container[str]) -> bool:
        """Whether all its parameters are among `names`. The ends come first: one of them is the last of a pass."""
        first, last = self.parameters[0], self.parameters[-1]
        return first in names and last in names and all(name in names for name in self.parameters)

    def gradient(self, gradients: Mapping[str, torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of this chunk; None if its parameters were not used.

        Raises:
            AttachError: Some of its vectors were used in this step, and others were not.
        """
        unused = [name for name in self.parameters if gradients[name] is None]
        if len(unused) == len(self.parameters):
            return None
        if unused:
            raise AttachError(
                f"{unused[0]!r} has no gradient in this step, while {self.name!r}, which travels as one tensor, has "
                "others. If parts of the model are not used in every step, pass transfer="
                "TransferOptions(join_vectors=False) on all workers."
            )
        return self.of({name: grad for name in self.parameters if (grad := gradients[name]) is not None})


def split(parameters: Tensors, elements: int) -> list[ParameterChunk]:
    """All parameters, in chunks of about `elements` elements at most. Vectors are not split."""
    chunks: list[ParameterChunk] = []
    for name, values in parameters.items():
        rows = values.shape[0] if values.dim() > 1 else 1
        number = min(rows, math.ceil(values.numel() / elements))
        if number < 2:
            chunks.append(ParameterChunk((name,)))
        else:
            edges = [round(i * rows / number) for i in range(number + 1)]
            chunks += [ParameterChunk((name,), edge) for edge in itertools.pairwise(edges)]
    return chunks


def join_vectors(
    chunks: Sequence[ParameterChunk], parameters: Tensors, elements: int, kind: Callable[[ParameterChunk], Hashable]
) -> list[ParameterChunk]:
    """Join vectors to chunks of at most `elements` elements, in the order of the model.

    Args:
        chunks: Chunks of the model.
        parameters: The parameters.
        elements: Most elements of a joined chunk.
        kind: Only vectors of one kind are joined; those of kind None are not.
    """
    found: list[ParameterChunk] = []
    open_chunks: dict[Hashable, int] = {}  # place of the chunk that takes the next vector of a kind
    for chunk in chunks:
        own = kind(chunk) if parameters[chunk.parameters[0]].dim() == 1 else None
        place = None if own is None else open_chunks.get(own)
        if place is not None:
            both = ParameterChunk((*found[place].parameters, *chunk.parameters))
            if sum(parameters[name].numel() for name in both.parameters) <= elements:
                found[place] = both
                continue
        if own is not None:
            open_chunks[own] = len(found)
        found.append(chunk)
    return found


def assign(chunks: Sequence[ParameterChunk], parameters: Tensors, servers: int) -> list[list[ParameterChunk]]:
    """Chunks of each server. The largest come first, each to the server with the fewest bytes so far."""
    sizes = {chunk: chunk.of(parameters).nbytes for chunk in chunks}
    load = [0] * servers
    home: dict[ParameterChunk, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: (-sizes[chunk], chunk.name)):
        home[chunk] = load.index(min(load))
        load[home[chunk]] += sizes[chunk]
    return [[chunk for chunk in chunks if home[chunk] == server] for server in range(servers)]
