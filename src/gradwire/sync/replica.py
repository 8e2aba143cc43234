"""The replica check: ranks exchange a hash of their parameters and compare, beside the gradients' own frames.

Guarantees: replicas that differ in one bit are found at the next check, but for a chance of 2⁻³². It costs one read of
the parameters (CRC-32C runs far above memory speed of a slow network's gradients) and 80 bytes a pair of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import google_crc32c
import numpy as np
import torch

from gradwire.core.errors import ReplicaError
from gradwire.core.spec import as_array


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32C over the bytes of all tensors in their order."""
    checksum = 0
    for tensor in tensors:
        checksum = google_crc32c.extend(checksum, as_array(tensor.cpu()).view(np.uint8))
    return checksum


def compare(hashes: np.ndarray) -> None:
    """Check the hashes of all ranks, float64[W, 1].

    Raises:
        ReplicaError: naming the ranks that differ from the majority.
    """
    by_rank = hashes[:, 0].tolist()
    common, _ = Counter(by_rank).most_common(1)[0]
    odd = [rank for rank, value in enumerate(by_rank) if value != common]
    if odd:
        raise ReplicaError(
            f"Expected identical parameters on all ranks, got others on rank {', '.join(map(str, odd))}. Do: look "
            "for code that changes parameters on some ranks only, or broadcast them from one rank and go on.",
            rank=odd[0],
            tensor="parameters",
            phase="replica check",
        )
