"""Tasks of simulated workers: SST-2 with bags of words, and part of CIFAR-10 with a small net. Nothing is pretrained.

The net is so small that one core trains it in seconds: three convolutions with a stride of 2 and a linear layer. It has
no normalization, whose statistics each worker would keep for itself, and images are not augmented.

Source of the bags of words: Iyyer et al. 2015, "Deep unordered composition rivals syntactic methods for text
classification".
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import nn

from benchmarks.data import cifar, sst2
from benchmarks.papers.thc.simulated_training import Replica, Task

LENGTH = 32  # words of a sentence; what is longer is cut
VOCABULARY = 2048
WIDTH = 128
_CHECKED = 4000  # training images of which the accuracy is taken


class Classifier(nn.Module):
    """The mean of the word vectors of a sentence, followed by two hidden layers.

    Args:
        learns_words: Whether to train vectors of 16 numbers, of which a batch uses a few. If not, vectors of 256 random
            numbers are fixed, so that all gradients are dense.
    """

    def __init__(self, learns_words: bool = True) -> None:
        super().__init__()
        word, std = (16, 0.3) if learns_words else (256, 2.0)
        self.words = nn.EmbeddingBag(VOCABULARY, word, mode="mean", padding_idx=sst2.NOTHING)
        nn.init.normal_(self.words.weight, std=std)
        self.words.requires_grad_(learns_words)
        layers = (nn.Linear(word, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.layers = nn.Sequential(*layers)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.words(words))
        return out


class SST2(Task):
    """Sentiment with AdamW and 8 sentences per worker, as in THC's simulations.

    Args:
        folder: Folder of the data.
        num_epochs: Passes over the training data.
        learns_words: See `Classifier`.
    """

    batch_size = 8

    def __init__(self, folder: Path, num_epochs: int, learns_words: bool = True) -> None:
        self.name = "sst2" if learns_words else "sst2, fixed words"
        self.num_epochs, self.learns_words = num_epochs, learns_words
        train, dev, test = (sst2.read(folder, split) for split in ("train", "dev", "test"))
        counts = Counter(word for sentence, _ in train for word in sentence.split())
        numbers = sst2.numbered(sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2])
        self.splits = {
            split: (sst2.tokens(lines, numbers, LENGTH), sst2.labels(lines))
            for split, lines in (("train", train), ("test", dev + test))
        }
        self.num_samples = len(train)

    def replica(self) -> Replica:
        """See `Task`."""
        model = Classifier(self.learns_words)
        return Replica(model, torch.optim.AdamW(each for each in model.parameters() if each.requires_grad))

    def rate(self, progress: float, num_workers: int) -> float:
        """Warm-up over a tenth of the steps, then decay to zero. As usual for Adam, it scales with √num_workers."""
        return 1e-3 * (num_workers / 4) ** 0.5 * min(10 * progress, (1 - progress) / 0.9)

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Task`."""
        words, labels = self.splits["train"]
        return words[index], labels[index]

    def right(self, model: nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        """See `Task`."""
        words, labels = (each[part::num_parts] for each in self.splits[split])
        found = [model(some).argmax(1) for some in words.split(500)]
        return int((torch.cat(found) == labels).sum()), len(labels)


class Net(nn.Sequential):
    """Convolutional net with 66 thousand parameters."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


class CIFAR10(Task):
    """Images with SGD with momentum.

    Args:
        data: See `benchmarks.data.cifar.load`.
        num_epochs: Passes over the training data.
        num_samples: Number of training images, chosen once for all trainings.
    """

    name = "cifar10"
    batch_size = 8

    def __init__(self, data: Path, num_epochs: int, num_samples: int) -> None:
        self.num_epochs, self.num_samples = num_epochs, num_samples
        images, labels = cifar.load(data, "train")
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:num_samples]
        self.splits = {"train": (images[chosen], labels[chosen]), "test": cifar.load(data, "test")}

    def replica(self) -> Replica:
        """See `Task`."""
        model = Net()
        return Replica(model, torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4))

    def rate(self, progress: float, num_workers: int) -> float:
        """Warm-up over a tenth of the steps, then decay to zero."""
        return 0.05 * min(10 * progress, (1 - progress) / 0.9)

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Task`."""
        return cifar.batch(self.splits["train"], index)

    def right(self, model: nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        """See `Task`."""
        of = min(_CHECKED, self.num_samples) if split == "train" else len(self.splits[split][1])
        right = total = 0
        for index in torch.arange(of)[part::num_parts].split(500):
            images, labels = cifar.batch(self.splits[split], index)
            right, total = right + int((model(images).argmax(1) == labels).sum()), total + len(labels)
        return right, total
