"""The larger text model: that of `gradwire bench`, with smaller batches, so that a training takes minutes."""

from __future__ import annotations

from typing import ClassVar

from gradwire.bench.text import SourceText


class SmallBatches(SourceText):
    """Characters of the standard library, 64 samples a rank instead of 304."""

    name: ClassVar[str] = "text-small-batches"
    summary: ClassVar[str] = "character model over the Python standard library's sources, batches of 64"
    batch_size: ClassVar[int] = 64
