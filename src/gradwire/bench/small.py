"""The workload of the short demo: the main workload's text and model, with narrower layers.

With a quarter of the parameters, a step with DDP takes about a second at 100 Mb/s, so that some methods can train for
more than a hundred steps and be timed within a minute and a half.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from gradwire.bench.text import CharacterModel, SourceText

HIDDEN = 640


class SmallText(SourceText):
    """The text of the main workload with a narrower model."""

    name: ClassVar[str] = "small"
    summary: ClassVar[str] = "character model over the Python standard library's sources, 1.8 million parameters"
    batch_size: ClassVar[int] = 128

    def model(self) -> nn.Module:
        """A model with 1.8 million parameters."""
        return CharacterModel(HIDDEN)
