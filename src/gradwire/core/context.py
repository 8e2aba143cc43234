"""The context of one encode or decode: tensor, step, rank, and the keys of random numbers.

Random numbers are counter-based, in two streams. The *shared* stream depends on seed, step, name and the global element
index, so it is the same on all ranks. The *private* stream also depends on rank and stage. Encoding twice with the same
context gives the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.core.spec import TensorSpec

_WORD = 0xFFFF_FFFF


@dataclass(frozen=True)
class Context:
    """Everything that an encode or a decode depends on, except for the gradient.

    Args:
        name: Parameter name.
        step: Synchronization step; that of the first gradients is 1.
        rank: Rank that encodes.
        world_size: Number of ranks in the process group.
        seed: Seed of the job, the same on all ranks.
        offset: Global index of the first element, if the gradient is a range of a tensor.
        stage: Number of encodes before this one on the path: 0 for a rank's own gradient, then one more per re-encode.
        spec: Shape and dtype to decode to, which decoders never take from the payload. None if `out=` has them.
        aux: Slices of the parameter and the optimizer state for these elements, by name (for gcomp).
        error_share: Share of the error of a step that this encode may make (for gcomp); None for 1 / world_size.
        state: State of the range that a `StatefulCompressor` returned in an earlier step; None at first.
    """

    name: str
    step: int = 0
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    offset: int = 0
    stage: int = 0
    spec: TensorSpec | None = None
    aux: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: np.ndarray | None = None
    error_share: float | None = None

    @property
    def shared_key(self) -> int:
        """64-bit key of the shared stream."""
        return _key(self.name, self.seed, self.step)

    @property
    def private_key(self) -> int:
        """64-bit key of the private stream."""
        return _key(self.name, self.seed, self.step, self.rank, self.stage)


def key_words(ctx: Context) -> np.ndarray:
    """Return the words of the shared and the private key, uint32[4]."""
    shared, private = ctx.shared_key, ctx.private_key
    return np.array([shared & _WORD, shared >> 32, private & _WORD, private >> 32], np.uint32)


def _key(name: str, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed + name.encode(), digest_size=8, person=b"gradwire").digest()
    return int.from_bytes(digest, "little")
