"""The replica check: ranks exchange a hash of their parameters, step and seed, and compare.

Guarantees: replicas that differ in one bit are found at the next check, except with a probability of 2⁻³². It costs one
read of the parameters and 96 bytes per pair of ranks.
"""
# Shapes: W = ranks

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np
import torch

from gradwire.core.errors import NO_TENSOR, ReplicaError
from gradwire.core.spec import as_array

ABSENT = math.nan  # instead of a hash, from a rank that has nothing to compare


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return the CRC-32C of the bytes of all tensors, in order."""
    checksum = 0
    for tensor in tensors:
        checksum = google_crc32c.extend(checksum, as_array(tensor.cpu()).view(np.uint8))
    return checksum


def numbers(tensors: Iterable[torch.Tensor] | None, step: int, seed: int) -> np.ndarray:
    """Return what ranks compare: a hash of their parameters (`ABSENT` for None), step, and a hash of the seed."""
    parameters = ABSENT if tensors is None else fingerprint(tensors)
    return np.array([parameters, step, google_crc32c.value(str(seed).encode())], np.float64)


def odd_ranks(numbers: np.ndarray) -> list[int]:
    """Return the ranks whose parameters differ from those of the majority, except absent ones.

    Args:
        numbers: Those of each rank, float64[W, 3].
    """
    by_rank = {rank: value for rank, value in enumerate(numbers[:, 0].tolist()) if not math.isnan(value)}
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


def check_steps(numbers: np.ndarray) -> None:
    """Raise a `ReplicaError` unless all ranks have the same step and seed, of which their random numbers are made."""
    found = [(step, seed) for _, step, seed in numbers.tolist()]
    [(common, _)] = Counter(found).most_common(1)
    for rank, (step, seed) in enumerate(found):
        if (step, seed) == common:
            continue
        other = found.index(common)
        what = f"Rank {rank} has another seed than rank {other}."
        if step != common[0]:
            what = f"Rank {rank} is in step {step:.0f}, and rank {other} in step {common[0]:.0f}."
        raise ReplicaError(
            f"{what} On all ranks, load the states that one job has saved at one step, or none.",
            rank=rank,
            tensor=NO_TENSOR,
            phase="replica check",
        )
