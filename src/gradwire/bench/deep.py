"""The workload with many small tensors: a deep and narrow character model on the same text as the main workload.

Hundreds of tensors of a few thousand elements show the cost of latency, frames and launches. In the model, the
characters of the context pass through residual blocks that mix positions, then channels.

Source: Tolstikhin et al. 2021, "MLP-Mixer". Differences: one-dimensional, with characters instead of patches.
"""
# Shapes: B = samples per batch, C = characters of context, D = channels, V = vocabulary

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from gradwire.bench.text import CONTEXT, VOCABULARY, SourceText

CHANNELS = 128
BLOCKS = 32


class DeepText(SourceText):
    """The text of the main workload with a model of hundreds of tensors."""

    name: ClassVar[str] = "deep"
    summary: ClassVar[str] = "deep and narrow character model, 2.3 million parameters in 390 tensors"
    batch_size: ClassVar[int] = 16

    def model(self) -> nn.Module:
        """A model with 2.3 million parameters."""
        return DeepModel()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD, as in the main workload."""
        return torch.optim.SGD(model.parameters(), lr=0.05)


class DeepModel(nn.Module):
    """Logits of the next character from the C characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, CHANNELS)
        self.blocks = nn.Sequential(*(Mixer() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Characters of shape (B, C), int64, to logits of shape (B, V)."""
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.embed(characters)).mean(1)))
        return logits


class Mixer(nn.Module):
    """Mixes positions, then channels, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.place_norm = nn.LayerNorm(CHANNELS)
        self.places = nn.Sequential(nn.Linear(CONTEXT, 2 * CONTEXT), nn.GELU(), nn.Linear(2 * CONTEXT, CONTEXT))
        self.channel_norm = nn.LayerNorm(CHANNELS)
        self.channels = nn.Sequential(nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU(), nn.Linear(2 * CHANNELS, CHANNELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (B, C, D) to the same shape."""
        x = x + self.places(self.place_norm(x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.channels(self.channel_norm(x))
        return out
