"""Small real trainings that the integration jobs share: scikit-learn's digits, a shard a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model(width: int = 96, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(
        dtype
    )


def wrap(module: nn.Module, bucket_cap_mb: float = 0.02, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, **options)  # type: ignore[arg-type]


def batches(rank: int, world_size: int, size: int = 16, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of this rank's part of the digits."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)[rank::world_size] / 16
    labels = torch.tensor(digits.target)[rank::world_size]
    order = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (size,), generator=order)
        yield images[chosen], labels[chosen]


def loss_of(ddp: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    dtype = next(ddp.parameters()).dtype
    return nn.functional.cross_entropy(ddp(images.to(dtype)).float(), labels)


def fingerprint(tensors: object) -> str:
    """Hash of the bytes of all tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:  # type: ignore[attr-defined]
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
