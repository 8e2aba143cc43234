"""The replica check: ranks exchange a hash of their parameters and compare, beside the gradients' own frames.

Guarantees: replicas that differ in one bit are found at the next check, but for a chance of 2⁻³². It costs one read of
the parameters (CRC-32C runs far above memory speed of a slow network's gradients) and 80 bytes a pair of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import google_crc32c
import numpy as np
import torch

from gradwire.core.errors import ReplicaError
from gradwire.core.spec import as_array

ABSENT = math.nan  # in place of the hash of a rank that has left for a while


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32C over the bytes of all tensors in their order."""
    checksum = 0
    for tensor in tensors:
        checksum = google_crc32c.extend(checksum, as_array(tensor.cpu()).view(np.uint8))
    return checksum


def compare(hashes: np.ndarray) -> None:
    """Check the hashes of all ranks, float64[W, 1], leaving out those that are absent.

    Raises:
        ReplicaError: naming the ranks that differ from the majority.
    """
    by_rank = {rank: value for rank, value in enumerate(hashes[:, 0].tolist()) if not math.isnan(value)}
    common = Counter(by_rank.values()).most_common(1)
    odd = [rank for rank, value in by_rank.items() if value != common[0][0]]
    if odd:
        raise ReplicaError(
            f"Expected identical parameters on all ranks, got others on rank {', '.join(map(str, odd))}. Do: look "
            "for code that changes parameters on some ranks only, or broadcast them from one rank and go on.",
            rank=odd[0],
            tensor="parameters",
            phase="replica check",
        )
