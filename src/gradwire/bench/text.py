"""The main workload: predict the next character in the sources of Python's standard library.

Every machine that runs this has the text. Files are read in the order of their names; every tenth is held out for
validation. Results can be compared between methods on one machine, and between machines with the same Python version.

The model concatenates the embeddings of the last characters and feeds them to wide residual layers. It has many
parameters and little arithmetic, so that the link matters even when two cores compute for four ranks.

Source: Bengio et al. 2003, "A neural probabilistic language model". Differences: characters instead of words, and
residual layers with LayerNorm.
"""
# Shapes: B = samples per batch, C = characters of context, D = embedding, H = hidden width, V = vocabulary

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from gradwire.bench.workload import Samples, Workload, batch_generator
from gradwire.core.errors import OptionError

CONTEXT = 24
EMBEDDING = 32
HIDDEN = 1312
LAYERS = 3
VOCABULARY = 97
"""95 printable ASCII characters, the end of a line, and one class for all others."""

_VALIDATION_SAMPLES = 4096
_LEARNING_RATE = 0.07
_LAST_RATE = 0.02  # lowest factor of the learning rate, so that the steps timed after the decay still train
_MAX_BYTES = 5_000_000
_HELD_OUT = 10  # every tenth file is for validation
_NEWLINE, _OTHER = 95, 96


class SourceText(Workload):
    """Characters of the standard library's top-level modules.

    Args:
        folder: Folder of the modules. Default: that of the running Python.

    Raises:
        OptionError: The folder holds too little source text.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "character model over the Python standard library's sources, 6.3 million parameters"
    batch_size: ClassVar[int] = 304

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or Path(sysconfig.get_paths()["stdlib"])
        files = source_files(folder)
        self._train = encode(files[index] for index in range(len(files)) if index % _HELD_OUT)
        self._held_out = encode(files[::_HELD_OUT])
        if min(len(self._train), len(self._held_out)) <= CONTEXT:
            raise OptionError(
                f"The text workload found only {len(files)} Python sources in {folder}. Use a Python whose standard "
                "library consists of .py files, or --workload digits."
            )

    def model(self) -> nn.Module:
        """A model with 6.3 million parameters."""
        return CharacterModel()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD.

        With momentum 0.9 and a tenth of the learning rate, fp32 and 3LC learn about as much. With plain error feedback,
        however, onebit diverges and topk falls behind, since delayed gradients need momentum correction (DGC).
        """
        return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

    def schedule(self, step: int, steps: int) -> float:
        """Linear warm-up over 20 steps, linear decay over the second half."""
        return min(1.0, (step + 1) / 20, max(_LAST_RATE, 2 * (steps - step) / max(1, steps)))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Samples:
        """Windows at random positions of the training text."""
        return _windows(self._train, self.batch_size, batch_generator(seed, step, rank, world_size))

    def validation(self) -> Samples:
        """Windows at fixed positions of the held-out files."""
        return _windows(self._held_out, _VALIDATION_SAMPLES, torch.Generator().manual_seed(0))


class CharacterModel(nn.Module):
    """Logits of the next character from the C characters before it.

    Args:
        hidden: H.
    """

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, EMBEDDING)
        self.join = nn.Linear(CONTEXT * EMBEDDING, hidden)
        self.layers = nn.Sequential(*(Residual(hidden) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)
        # With zeros, the first predictions are uniform and cause no large gradients.
        nn.init.zeros_(self.head.weight)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Characters of shape (B, C), int64, to logits of shape (B, V)."""
        joined: torch.Tensor = self.join(self.embed(characters).flatten(1))
        logits: torch.Tensor = self.head(self.norm(self.layers(joined)))
        return logits


class Residual(nn.Module):
    """LayerNorm, GELU and a linear layer, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.5 / width**0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (B, H) to the same shape."""
        out: torch.Tensor = x + self.linear(nn.functional.gelu(self.norm(x)))
        return out


def source_files(folder: Path) -> list[Path]:
    """Modules in a folder in the order of their names, up to a total of 5 MB."""
    chosen, total = [], 0
    for path in sorted(folder.glob("*.py")):
        total += path.stat().st_size
        if total > _MAX_BYTES:
            break
        chosen.append(path)
    return chosen


def encode(files: Iterable[Path]) -> torch.Tensor:
    """The concatenated characters of files as classes, uint8."""
    raw = b"".join(path.read_bytes() for path in files)
    return _CLASSES[torch.frombuffer(bytearray(raw), dtype=torch.uint8).int()] if raw else torch.empty(0)


def _classes() -> torch.Tensor:
    """Class of each byte. Bytes of characters beyond ASCII belong to the class of others."""
    classes = torch.full((256,), _OTHER, dtype=torch.uint8)
    classes[32:127] = torch.arange(95, dtype=torch.uint8)
    classes[ord("\n")] = _NEWLINE
    return classes


_CLASSES = _classes()


def _windows(text: torch.Tensor, count: int, generator: torch.Generator) -> Samples:
    """`count` windows of C characters and the character that follows each."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return Samples(windows[:, :CONTEXT], windows[:, CONTEXT])
