"""What the encodes and decodes of a job see of parameters and optimizer state."""

# Shapes: W = ranks.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from gradwire.core import host
from gradwire.core.spec import ElementRange

OptimizerSlices = Callable[[str, ElementRange], Mapping[str, torch.Tensor]]
"""Slices of parameter and optimizer state, by parameter name and element range: `Context.aux`."""

_NOT_COMMON = {"common": host.tensor(False, torch.bool)}


class OptimizerView(NamedTuple):
    """Slices of parameters and optimizer state, and what their strategy makes of them.

    Attributes:
        slices: Returns `Context.aux`.
        shows_mismatch: Whether all ranks learn of it if the state of one differs. If not, no payload relies on it.
        merges_once: Whether an element is encoded once by each rank that sends it, and once by the rank that merges it.
    """

    slices: OptimizerSlices
    shows_mismatch: bool = False
    merges_once: bool = False

    def aux(self, name: str, elements: ElementRange, common: bool = True) -> Mapping[str, torch.Tensor]:
        """Return `Context.aux`, marked as not common to all ranks if `common` is false or nobody would notice."""
        found = self.slices(name, elements)
        return found if common and self.shows_mismatch else {**found, **_NOT_COMMON}

    def error_share(self, is_aggregate: bool, num_encoders: int) -> float | None:
        """Share of the error of a step that one encode may make; None for an equal one.

        Where elements are merged once, half is for the aggregate and half for the W − 1 encodes before it: of all ways
        to share, this one saves the most bits.
        """
        if not self.merges_once or num_encoders < 2:
            return None
        return 0.5 if is_aggregate else 0.5 / (num_encoders - 1)
