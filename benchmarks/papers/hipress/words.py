"""A word-level language model: an LSTM predicts the next word of WikiText-2.

The folder of the data holds the two smaller files, `valid.txt` for training and `test.txt` for validation. Any other
text with words separated by spaces works, too.

Source: Zaremba et al. 2014, "Recurrent neural network regularization", plain SGD with clipped gradients. Differences:
one layer and no dropout, for a few hundred steps; the vocabulary is limited to the most frequent words; windows start
anywhere with an empty state, so that batches depend only on seed, step and rank.
"""
# Shapes: B = windows per batch, T = words per window, D = embedding, H = hidden width, V = vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from gradwire.bench.workload import Samples, Workload, batch_generator
from gradwire.core.errors import OptionError

TRAIN, HELD_OUT = "valid.txt", "test.txt"
WINDOW = 32
EMBEDDING, HIDDEN = 160, 256
VOCABULARY = 4000
UNKNOWN, END = "<unk>", "<eos>"

_VALIDATION_WINDOWS = 512
_LEARNING_RATE = 10.0
_CLIP = 0.25  # largest norm of the mean gradient


class WordText(Workload):
    """Words of a text.

    Args:
        folder: Folder of the two files.

    Raises:
        OptionError: A file is missing or too short.
    """

    name: ClassVar[str] = "lstm"
    summary: ClassVar[str] = "LSTM over words, 2.1 million parameters"
    batch_size: ClassVar[int] = 16

    def __init__(self, folder: Path) -> None:
        texts = [read_words(folder / name) for name in (TRAIN, HELD_OUT)]
        known = vocabulary(texts[0])
        self._train, self._held_out = (encode(words, known) for words in texts)

    def model(self) -> nn.Module:
        """A model with 2.1 million parameters, most of them in two matrices of the vocabulary."""
        return WordModel()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD. Clips the mean gradient of all ranks, as is usual for LSTMs."""
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        parameters = list(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: _clip(parameters))
        return optimizer

    def schedule(self, step: int, steps: int) -> float:
        """Constant, then linear decay over the last third to a tenth."""
        return min(1.0, max(0.1, 3 * (steps - step) / max(1, steps)))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """Windows at random positions of the training text."""
        generator = batch_generator(seed, step, rank, world_size)
        return _windows(
            self._train, torch.randint(len(self._train) - WINDOW, (self.batch_size, 1), generator=generator)
        )

    def validation(self) -> Samples:
        """Evenly spaced windows of the held-out text."""
        places = torch.linspace(0, len(self._held_out) - WINDOW - 1, _VALIDATION_WINDOWS).long()
        return _windows(self._held_out, places.unsqueeze(1))


class WordModel(nn.Module):
    """Logits of the next word at every position of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Words of shape (B, T), int64, to logits of shape (B, V, T), as the loss expects them."""
        states, _ = self.lstm(self.embed(words))
        logits: torch.Tensor = self.head(states)
        return logits.transpose(1, 2)


def read_words(path: Path) -> list[str]:
    """The words of a file, with a mark at the end of each line.

    Raises:
        OptionError: The file is missing, or holds fewer words than a window.
    """
    if not path.is_file():
        raise OptionError(
            f"There is no {path.name} in {path.parent}. Download WikiText-2, and give a folder with its files {TRAIN} "
            f"and {HELD_OUT}."
        )
    words = [word for line in path.read_text().splitlines() if line.strip() for word in (*line.split(), END)]
    if len(words) <= WINDOW + 1:
        raise OptionError(f"{path} has only {len(words)} words. Give a text with more than {WINDOW + 1}.")
    return words


def vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Class of each of the most frequent words; 0 stands for all others."""
    counts = Counter(words)
    del counts[UNKNOWN]
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 1]
    return {UNKNOWN: 0} | {word: number for number, word in enumerate(frequent, 1)}


def encode(words: Sequence[str], known: dict[str, int]) -> torch.Tensor:
    """Words as classes, int64."""
    return torch.tensor([known.get(word, 0) for word in words])


def _windows(text: torch.Tensor, starts: torch.Tensor) -> Samples:
    windows = text[starts + torch.arange(WINDOW + 1)]
    return Samples(windows[:, :-1], windows[:, 1:])


def _clip(parameters: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, _CLIP)
