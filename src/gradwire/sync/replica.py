"""The replica check: ranks exchange a hash of their parameters and compare.

Guarantees: replicas that differ in one bit are found at the next check, except with a probability of 2⁻³². It costs one
read of the parameters and 80 bytes per pair of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np
import torch

from gradwire.core.errors import ReplicaError
from gradwire.core.spec import as_array

ABSENT = math.nan  # instead of a hash, from a rank that has nothing to compare


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return the CRC-32C of the bytes of all tensors, in order."""
    checksum = 0
    for tensor in tensors:
        checksum = google_crc32c.extend(checksum, as_array(tensor.cpu()).view(np.uint8))
    return checksum


def odd_ranks(hashes: np.ndarray) -> list[int]:
    """Return the ranks that differ from the majority, except absent ones.

    Args:
        hashes: Hash of each rank, float64[W, 1], or `ABSENT`.
    """
    by_rank = {rank: value for rank, value in enumerate(hashes[:, 0].tolist()) if not math.isnan(value)}
    common = Counter(by_rank.values()).most_common(1)
    return [rank for rank, value in by_rank.items() if value != common[0][0]]


def fail(odd: Sequence[int]) -> None:
    """Raise the `ReplicaError` that names the ranks that differ."""
    raise ReplicaError(
        f"The parameters of rank {', '.join(map(str, odd))} differ from those of the other ranks. Look for code "
        "that changes parameters on some ranks only, or broadcast them from one rank and go on.",
        rank=odd[0],
        tensor="parameters",
        phase="replica check",
    )
