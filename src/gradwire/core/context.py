"""The context of one encode or decode: which tensor, which step, which rank, and the keys of randomness.

Randomness is counter-based and comes in two streams. The *shared* stream depends on (seed, step, name) and the
global element index, so it is the same on all ranks; the *private* stream depends on rank and stage as well.
Encoding twice under the same context gives the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.core.spec import TensorSpec


@dataclass(frozen=True)
class Context:
    """Everything but the gradient that an encode or a decode depends on.

    Args:
        name: parameter name; part of both random streams.
        step: synchronization step, counted from 0.
        rank: rank that encodes.
        world_size: ranks in the process group.
        seed: seed of the job, the same on all ranks.
        offset: global element index of the first element, where the gradient is a range of a tensor.
        stage: which encode of the path this is: 0 for a rank's own gradient, then one for each re-encode.
        spec: shape and dtype to decode to; a decoder never takes these from the payload. None means the
            caller hands `out=` to decode.
        aux: slices of parameter and optimizer state that belong to the gradient, by name (for gcomp).
        state: state of the range that a `StatefulCompressor` has left in an earlier step; None at first.
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

    @property
    def shared_key(self) -> int:
        """64-bit key of the stream that all ranks share."""
        return _key(self.name, self.seed, self.step)

    @property
    def private_key(self) -> int:
        """64-bit key of the stream of this rank and stage."""
        return _key(self.name, self.seed, self.step, self.rank, self.stage)


def _key(name: str, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed + name.encode(), digest_size=8, person=b"gradwire").digest()
    return int.from_bytes(digest, "little")
