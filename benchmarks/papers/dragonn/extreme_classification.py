"""Extreme classification with sparsifiers in the lab: DRAGONN's figure 7 and a row of its table 2.

The folder holds `delicious-train.arff` and `delicious-test.arff` as published by the authors of the data set: 12,920
and 3,185 pages with 500 binary words and 983 tags. Since 983 is few for "extreme", a fixed random layer first maps
words to `WIDTH` features, which makes the trained layer a large tensor. Four ranks train it; precision at 1 refers to
the test pages.

Source: DRAGONN (Wang et al. 2022), sections 5.1 and 5.3, XML, which also embeds features and trains a last layer of
4,096 by 30,938 without bias. Data: Tsoumakas et al. 2008. Differences: `WIDTH` by 983, 8.1 million parameters instead
of 127 million; 4 ranks on CPUs instead of 16 GPUs; the loss is the cross-entropy to equal shares for all tags of a
page; SGD with momentum, with momentum correction for all sparsifiers. Random keeps a residual, because without one it
does not learn here.
"""
# Shapes: B = pages of a batch, F = words, D = features, L = tags

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from benchmarks.papers.dragonn import learning
from benchmarks.papers.dragonn.learning import Design, Study
from gradwire.bench.workload import Samples, Workload, batch_generator
from gradwire.core.errors import OptionError

WORDS, TAGS = 500, 983
WIDTH = 8192
LEARNING_RATE, MOMENTUM = 20.0, 0.9
TRAIN, TEST = "delicious-train.arff", "delicious-test.arff"


class Delicious(Workload):
    """Tags of bookmarked pages.

    Args:
        folder: Folder of the two files.
        width: Number of features, the rows of the trained layer.

    Raises:
        OptionError: A file is missing.
    """

    name: ClassVar[str] = "delicious"
    summary: ClassVar[str] = "tags of pages, one layer of 8,192 random features by 983 tags, 8.1 million parameters"
    batch_size: ClassVar[int] = 64

    def __init__(self, folder: Path, width: int = WIDTH) -> None:
        self.width = width
        self._train, self._test = (read(folder / name) for name in (TRAIN, TEST))
        generator = torch.Generator().manual_seed(0)  # the same features for every seed of a training
        self._weight = torch.randn(WORDS, width, generator=generator)
        self._bias = torch.randn(width, generator=generator)
        self._held_out: Samples | None = None

    def model(self) -> nn.Module:
        """The last layer alone. It starts at zero, so that the first predictions are uniform."""
        layer = nn.Linear(self.width, TAGS, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def schedule(self, step: int, steps: int) -> float:
        """Linear warm-up over 20 steps, and linear decay over the second half."""
        return min(1.0, (step + 1) / 20, max(0.05, 2 * (steps - step) / max(1, steps)))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """Pages drawn at random."""
        generator = batch_generator(seed, step, rank, world_size)
        return self._samples(self._train, torch.randint(len(self._train[0]), (self.batch_size,), generator=generator))

    def validation(self) -> Samples:
        """The pages of the test file."""
        if self._held_out is None:
            self._held_out = self._samples(self._test, torch.arange(len(self._test[0])))
        return self._held_out

    def _samples(self, data: tuple[torch.Tensor, torch.Tensor], index: torch.Tensor) -> Samples:
        words, tags = data[0][index].float(), data[1][index].float()
        norm = words.sum(1, keepdim=True).clamp(min=1).sqrt()
        features = torch.relu(words / norm @ self._weight + 0.5 * self._bias)
        features /= features.norm(dim=1, keepdim=True)
        return Samples(features, tags / tags.sum(1, keepdim=True))


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and tags of each page that has a tag, bool[N, F] and bool[N, L].

    Raises:
        OptionError: The file is missing, or has no sparse rows of these attributes.
    """
    if not path.is_file():
        raise OptionError(
            f"There is no {path.name} in {path.parent}. Download the Delicious data set of the Mulan repository, "
            f"and give the folder of {TRAIN} and {TEST}."
        )
    rows = [line for line in path.read_text().splitlines() if line.startswith("{")]
    found = torch.zeros(len(rows), WORDS + TAGS, dtype=torch.bool)
    for page, row in enumerate(rows):
        places = [int(entry.split()[0]) for entry in row.strip("{} ").split(",") if entry]
        found[page, places] = True
    words, tags = found[:, :WORDS], found[:, WORDS:]
    tagged = tags.any(1)
    return words[tagged], tags[tagged]


STUDY = Study(
    name="extreme-classification",
    workload="benchmarks.papers.dragonn.extreme_classification.Delicious",
    measure="precision at 1",
    designs=(
        Design("dense", "ddp-fp32"),
        Design("dragonn", "dragonn:ratio=0.001/momentum"),
        Design("dragonn at equal bytes", "dragonn:ratio=0.00158/momentum"),  # as many elements as topk sends
        Design("dgc", "dgc:ratio=0.001/momentum"),
        Design("topk", "topk:ratio=0.001/momentum"),
        Design("random", "randomk:ratio=0.001:scaled=False/momentum"),
        Design("signsgd", "signsgd/momentum:masking=False"),
    ),
    steps=400,
    validate_every=20,
)


run, table, plot, KEY, CHOICES = STUDY.run, STUDY.table, STUDY.plot, learning.KEY, learning.CHOICES
