"""The workload with the smallest tensors: 454 of them with 2.6 MB in all, trained on scikit-learn's digits.

152 linear layers of 64 × 64 with biases and 75 layer norms: a third of the tensors are matrices of 16 KiB, the others
vectors of 256 bytes. What a tensor costs in itself shows here, more than what its bytes cost.
"""
# Shapes: B = samples per batch

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from gradwire.bench.digits import Digits

WIDTH = 64  # pixels of an image, and width of all layers
BLOCKS = 75
CLASSES = 10


class Blocks(Digits):
    """The digits with a model of hundreds of tiny tensors."""

    name: ClassVar[str] = "blocks"
    summary: ClassVar[str] = "scikit-learn's digits, 75 residual blocks, 0.64 million parameters in 454 tensors"

    def model(self) -> nn.Module:
        """A model with 640,000 parameters."""
        return BlockModel()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(model.parameters(), lr=0.02)


class BlockModel(nn.Module):
    """Logits of the classes from the pixels of an image. The last layer has more outputs than there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels of shape (B, 64) to logits of shape (B, 10)."""
        logits: torch.Tensor = self.layers(pixels)[:, :CLASSES]
        return logits


class Block(nn.Module):
    """LayerNorm and two linear layers, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (B, 64) to the same shape."""
        out: torch.Tensor = x + self.layers(x)
        return out
