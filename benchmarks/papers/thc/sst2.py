"""SST-2, sentences of film reviews as good or bad, and bags of words that learn it from scratch.

The data is a folder with `train.tsv`, `dev.tsv` and `test.tsv`: a sentence in lower case, a tab, and 0 or 1 on each
line. Held out are `dev` and `test` together. There is no pretrained model.

Source of the data: Socher et al. 2013, "Recursive deep models for semantic compositionality over a sentiment treebank".
Source of the model: Iyyer et al. 2015, "Deep unordered composition rivals syntactic methods for text classification".
"""
# Shapes: B sentences, L words

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.papers.thc.simulated_training import Replica, Task

LENGTH = 32  # words of a sentence; what is longer is cut
VOCABULARY = 2048
WIDTH = 128
_NOTHING, _OTHER = 0, 1  # no word, and one that is not in the vocabulary


class Sentences(NamedTuple):
    """int64[B, L] and int64[B]."""

    words: torch.Tensor
    labels: torch.Tensor


def load(folder: Path) -> tuple[Sentences, Sentences]:
    """What is trained on, and what is held out; the vocabulary is that of the former."""
    train, *others = (
        [line.split("\t") for line in _lines(folder / f"{name}.tsv")] for name in ("train", "dev", "test")
    )
    counts = Counter(word for text, _ in train for word in text.split())
    known = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2]
    number = {word: index for index, word in enumerate(known, start=2)}
    return _sentences(train, number), _sentences([line for each in others for line in each], number)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _sentences(lines: list[list[str]], number: dict[str, int]) -> Sentences:
    words = torch.full((len(lines), LENGTH), _NOTHING)
    for row, (text, _) in zip(words, lines):
        found = [number.get(word, _OTHER) for word in text.split()[:LENGTH]]
        row[: len(found)] = torch.tensor(found)
    return Sentences(words, torch.tensor([int(label) for _, label in lines]))


class Classifier(nn.Module):
    """The mean of the word vectors of a sentence, through two hidden layers.

    Args:
        learns_words: vectors of 16 numbers that are learnt, of which a batch has a few; else of 256 that are drawn and
            stay, so that all gradients are dense.
    """

    def __init__(self, learns_words: bool = True) -> None:
        super().__init__()
        word, std = (16, 0.3) if learns_words else (256, 2.0)
        self.words = nn.EmbeddingBag(VOCABULARY, word, mode="mean", padding_idx=_NOTHING)
        nn.init.normal_(self.words.weight, std=std)
        self.words.requires_grad_(learns_words)
        layers = (nn.Linear(word, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.layers = nn.Sequential(*layers)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.words(words))
        return out


class SST2(Task):
    """Sentiment by AdamW; 8 sentences a worker, as in THC's simulations.

    Args:
        folder: of the data.
        num_epochs: passes over the training data.
        learns_words: see `Classifier`.
    """

    batch_size = 8

    def __init__(self, folder: Path, num_epochs: int, learns_words: bool = True) -> None:
        self.name = "sst2" if learns_words else "sst2, fixed words"
        self.num_epochs, self.learns_words = num_epochs, learns_words
        train, test = load(folder)
        self.splits = {"train": train, "test": test}
        self.num_samples = len(train.labels)

    def replica(self) -> Replica:
        """See `Task`."""
        model = Classifier(self.learns_words)
        return Replica(model, torch.optim.AdamW(each for each in model.parameters() if each.requires_grad))

    def rate(self, progress: float, num_workers: int) -> float:
        """Rises over a tenth of the steps, then falls to zero; by the root of the workers, as is usual for Adam."""
        return 1e-3 * (num_workers / 4) ** 0.5 * min(10 * progress, (1 - progress) / 0.9)

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Task`."""
        train = self.splits["train"]
        return train.words[index], train.labels[index]

    def right(self, model: nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        """See `Task`."""
        words, labels = (each[part::num_parts] for each in self.splits[split])
        found = [model(some).argmax(1) for some in words.split(500)]
        return int((torch.cat(found) == labels).sum()), len(labels)
