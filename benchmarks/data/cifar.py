"""CIFAR-10 from JPEG files, and a small ResNet of the family that the papers train on it.

The data is a folder, or a tar of it, with `train` and `test`, each of which has one folder of images per class. Images
are decoded once, and the arrays are kept in another folder, one for each path and time of `data`. Source of the data:
Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
Split = tuple[torch.Tensor, torch.Tensor]
"""uint8[N, 3, 32, 32] and int64[N]."""


def load(data: Path, split: str, kept: Path | None = None) -> Split:
    """One split.

    Args:
        data: Folder or tar file.
        split: ``"train"`` or ``"test"``.
        kept: Folder for the decoded arrays. Default: one for this data in the folder for temporary files.

    Raises:
        FileNotFoundError: There is no such folder or file.
    """
    state = f"{data.resolve()} {data.stat().st_mtime_ns}"
    kept = kept or Path(tempfile.gettempdir()) / f"gradwire-cifar10-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    images, labels = kept / f"{split}-images.npy", kept / f"{split}-labels.npy"
    if not labels.exists():
        kept.mkdir(parents=True, exist_ok=True)
        _decode(data, kept)
    return torch.from_numpy(np.load(images)), torch.from_numpy(np.load(labels))


def _decode(data: Path, kept: Path) -> None:
    from PIL import Image

    found: dict[str, tuple[list[np.ndarray], list[str]]] = {"train": ([], []), "test": ([], [])}
    for path, content in _files(data):
        split, label = path.parts[-3:-1]
        images, labels = found[split]
        images.append(np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), np.uint8).transpose(2, 0, 1))
        labels.append(label)
    names = sorted(set(found["train"][1]))
    for split, (images, labels) in found.items():
        np.save(kept / f"{split}-images.npy", np.stack(images))
        np.save(kept / f"{split}-labels.npy", np.array([names.index(label) for label in labels], np.int64))


def _files(data: Path) -> Iterator[tuple[Path, bytes]]:
    if data.is_file():
        with tarfile.open(data) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".jpg"):
                    content = archive.extractfile(member)
                    assert content is not None, "a file"
                    yield Path(member.name), content.read()
        return
    tars = sorted(data.glob("*.tar*"))
    if tars:
        yield from _files(tars[0])
        return
    for path in sorted(data.rglob("*.jpg")):
        yield path, path.read_bytes()


def batch(split: Split, index: torch.Tensor, *, generator: torch.Generator | None = None) -> Split:
    """Normalized images, float32, and labels. With a generator, images are cropped and flipped at random."""
    images, labels = split[0][index].float().div_(255), split[1][index]
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    if generator is None:
        return images, labels
    padded = functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, len(index)), generator=generator)
    flips = torch.rand(len(index), generator=generator) < 0.5
    for i, (image, y, x, flip) in enumerate(zip(padded, down.tolist(), right.tolist(), flips.tolist())):
        crop = image[:, y : y + 32, x : x + 32]
        images[i] = crop.flip(2) if flip else crop
    return images, labels


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inside + self.around(x))


class ResNet(nn.Module):
    """He et al. 2015, section 4.2: 6 · `blocks` + 2 layers.

    Args:
        blocks: Blocks in each of the three stages.
        width: Channels of the first stage.
        stride: Stride of the first convolution. 2 makes a step four times cheaper, for slow machines.
    """

    def __init__(self, blocks: int = 1, width: int = 32, stride: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            outputs = width << stage
            for block in range(blocks):
                stages.append(Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(functional.relu(self.norm(self.stem(x))))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def accuracy(model: nn.Module, test: Split) -> float:
    """Top-1 accuracy on all of `test`."""
    model.eval()
    right = 0
    with torch.no_grad():
        for index in torch.arange(len(test[1])).split(500):
            images, labels = batch(test, index)
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / len(test[1])
