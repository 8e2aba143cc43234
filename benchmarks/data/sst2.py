"""SST-2: sentences of film reviews, positive or negative.

The data is a folder with `train.tsv`, `dev.tsv` and `test.tsv`. Each line has a lower-case sentence, a tab, and 0 or 1.
Source: Socher et al. 2013, "Recursive deep models for semantic compositionality over a sentiment treebank".
"""
# Shapes: B sentences, L words

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

Line = tuple[str, int]
"""A sentence, and 1 where it is good."""
NOTHING, OTHER = 0, 1  # no word, and one that is not in the vocabulary


def read(folder: Path, split: str) -> list[Line]:
    """The sentences of ``"train"``, ``"dev"`` or ``"test"``."""
    lines = (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    pairs = (line.rsplit("\t", 1) for line in lines if "\t" in line)
    return [(sentence, int(label)) for sentence, label in pairs]


def numbered(words: Sequence[str]) -> dict[str, int]:
    """A number above `OTHER` for each word of a vocabulary."""
    return {word: number for number, word in enumerate(words, start=OTHER + 1)}


def tokens(lines: Sequence[Line], numbers: Mapping[str, int], length: int) -> torch.Tensor:
    """The first words of each sentence as numbers, int64[B, L]."""
    found = torch.full((len(lines), length), NOTHING)
    for row, (sentence, _) in zip(found, lines):
        known = [numbers.get(word, OTHER) for word in sentence.split()[:length]] or [OTHER]
        row[: len(known)] = torch.tensor(known)
    return found


def labels(lines: Sequence[Line]) -> torch.Tensor:
    """int64[B]."""
    return torch.tensor([label for _, label in lines])
