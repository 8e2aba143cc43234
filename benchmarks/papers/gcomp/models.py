"""The two trainings of the GCOMP studies: a small ResNet on CIFAR-10, and a small transformer encoder on SST-2.

Both start from scratch, as the paper's do. `benchmarks.data` describes the data. The ResNet has batch normalization and
no zeros among its gradients. Most of the transformer's are zeros, of words that are not in the batch, see
`benchmarks.papers.gcomp.zeros`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.data import cifar, sst2

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """A model, and its batches by seed, step and rank."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]


def resnet(data: Path, batch_size: int, blocks: int = 1) -> Training:
    """ResNet-(6 · blocks + 2) of width 32. Batches are cropped and flipped at random."""
    split = cifar.load(data, "train")

    def batch(seed: int, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank)
        index = torch.randint(0, len(split[1]), (batch_size,), generator=generator)
        return cifar.batch(split, index, generator=generator)

    return Training("ResNet", lambda: cifar.ResNet(blocks, 32, 2), batch)


WORDS = 6000
LENGTH = 32


class Encoder(nn.Module):
    """A transformer encoder with two layers, and a head over its mean output."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        found = self.layers(self.words(tokens) + self.places, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2)
        out: torch.Tensor = self.head((found * kept).sum(1) / kept.sum(1))
        return out


def transformer(data: Path, batch_size: int) -> Training:
    """Transformer on the first 32 words of each sentence. The 5,998 most frequent words have their own embeddings."""
    lines = sst2.read(data, "train")
    counts = Counter(word for sentence, _ in lines for word in sentence.split())
    numbers = sst2.numbered([word for word, _ in counts.most_common(WORDS - 2)])
    tokens, labels = sst2.tokens(lines, numbers, LENGTH), sst2.labels(lines)

    def batch(seed: int, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank)
        index = torch.randint(0, len(labels), (batch_size,), generator=generator)
        return tokens[index], labels[index]

    return Training("transformer", Encoder, batch)


def trainings(cifar10: Path, sst2: Path, batch_size: int) -> list[Training]:
    """Both models, for ranks with batches of this size."""
    return [resnet(cifar10, batch_size), transformer(sst2, batch_size)]
