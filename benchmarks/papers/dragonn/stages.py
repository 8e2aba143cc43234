"""The ranks of `benchmarks.papers.dragonn.ablation`. Each stage adds one part of DRAGONN.

The stages are built like those of `benchmarks.papers.hipress.stages`. Dense decoding works as in other systems: the
payload of each rank becomes a tensor, and the tensors are added.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.papers.hipress.stages import EVERY_TENSOR, How, runner
from gradwire.bench import worker
from gradwire.compressors import Compressor, make, register
from gradwire.core.context import Context
from gradwire.planner.fidelity import RankedCompressor
from gradwire.sync.plan import Plan
from gradwire.wire.payload import Payload

STAGES = ("dgc", "hashing", "selection", "sparse decoding")
PLANNED = ("selection", "sparse decoding")
RATIO = 0.001
GATHERED = "allgather"  # as in the paper


class Densely(Compressor):
    """Mixin that decodes payloads one by one, each into its own tensor."""

    def decode_sum(
        self,
        payloads: Sequence[Payload],
        ctxs: Sequence[Context],
        out: torch.Tensor,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """See `Compressor`."""
        out.zero_()
        for payload, ctx in zip(payloads, ctxs, strict=True):
            out += self.decode(payload, ctx, out=torch.empty_like(out), stats=stats)
        return out


def densely(name: str) -> type[Compressor]:
    """Derive the compressor ``NAME_dense``, which differs from NAME only in how it decodes sums."""
    there: Any = type(make(name))
    found: type[Compressor] = type(f"{name}_dense", (Densely, there), {"name": f"{name}_dense"})
    return found


def register_all() -> None:
    """Register the compressors of the stages."""
    for name in ("dgc", "dragonn"):
        register(densely(name))


def how(stage: str) -> How:
    """How a stage synchronizes gradients."""
    codec = {"dgc": "dgc_dense", "sparse decoding": "dragonn"}.get(stage, "dragonn_dense")
    if stage in PLANNED:
        spec = f"{codec}:ratio={RATIO}"
        return How(
            Plan(make(codec, ratio=RATIO), strategy=GATHERED),
            chosen=(RankedCompressor(spec, (GATHERED,)),),
            partitions=(1,),
        )
    return How(Plan({EVERY_TENSOR: make(codec, ratio=RATIO)}, strategy=GATHERED))


if __name__ == "__main__":
    register_all()
    worker.main(partial(runner, how_of=how))
