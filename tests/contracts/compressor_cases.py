"""Cases of the contract suite: every registered compressor, with option sets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.compressors.base.contract import compensate
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.spec import TensorSpec, as_array, as_tensor
from gradwire.testing.cases import (
    BACKENDS,
    EDGE_TENSORS,
    NONFINITE_TENSORS,
    bits,
    context,
    float32_context,
    heavy_tailed,
    normal,
    reduced,
    with_body,
)
from gradwire.wire.payload import Payload

__all__ = [
    "BACKENDS", "CASES", "EDGE_TENSORS", "NONFINITE_TENSORS", "OPTION_SETS", "Halving", "bits", "context",
    "every_case", "float32_context", "heavy_tailed", "marks", "normal", "reduced", "use_backend", "with_body",
]  # fmt: skip

# Every registered compressor has its defaults here, by `every_case`, and the option sets that change its format.
OPTION_SETS: dict[str, list[dict]] = {
    "int8": [{"block": 64, "stochastic": False}, {"block": 100}],
    "lossless": [{"code": "fixed"}],
    "int8shared": [{"block": 100}, {"block": 64, "stochastic": False}],
    "topk": [{"ratio": 0.3}, {"ratio": 1.0}, {"ratio": 0.01, "warmup": 100}],
    "threelc": [
        {"sparsity": 1.75},
        {"sparsity": 1.999999, "zero_run": False},
        {"block": 35_000},
        {"block": 35_000, "zero_run": False},
    ],
    "ternary": [{"sparsity": 1.75}, {"sparsity": 1.999999, "zero_run": True}, {"sparsity": 1.75, "fit": True}],
    "minmax": [{"bits": 4}],
    "onebit": [{"block": 64}],
    "terngrad": [{"clip": 0.0}],
    "dgc": [{"ratio": 0.3, "sample": 0.1, "warmup": 100}],
    "adacomp": [{"block": 24, "threshold": 0.5}],
    "qsgd": [{"bits": 8, "block": 100}, {"bits": 2}],
    "randomk": [{"ratio": 0.5}],
    "dragonn": [{"ratio": 0.2}, {"ratio": 0.2, "carry": True}],
    "mstopk": [{"ratio": 0.1}],
    "threshold": [{"threshold": 0.01}],
    "powersgd": [{"rank": 1}, {"rank": 12}],
    "thc": [{"bits": 3, "granularity": 20, "block": 64, "p": 2**-10}, {"bits": 5, "rotate": "full"}],
    "uthc": [{"bits": 8, "rotate": "none"}, {"bits": 2, "block": 128}],
}


class Halving(Compressor):
    """The least that a user must write: elements halved, in float32. Uses all defaults of the base class."""

    name = "halving"
    default_feedback = "error"

    def contraction(self, spec: TensorSpec) -> float:
        return 0.75

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        return 4 * spec.numel

    def encode(self, grad, ctx, stats=(), *, scale=1.0, residual_in=None, residual_out=None) -> Payload:
        x = np.empty(grad.numel(), np.float32) if residual_out is None else residual_out
        half = as_array(compensate(grad, scale, residual_in, x)) * np.float32(0.5)
        if not np.isfinite(half).all():
            return Payload(np.empty(0, np.uint8), nonfinite=True)
        x -= half
        return Payload(half.view(np.uint8))

    def decode(self, payload, ctx, out=None, accumulate=False, stats=()) -> torch.Tensor:
        if accumulate and (out is None or out.dtype != torch.float32):
            raise ValueError("accumulate=True needs a float32 out.")
        out = self._output(ctx, out)
        if payload.nonfinite:
            self._expect_bytes(payload, 0)
            return out.fill_(torch.nan)
        half = self._expect_bytes(payload, 4 * out.numel()).copy().view(np.float32)
        values = as_tensor(half, TensorSpec(tuple(out.shape)))
        return out.add_(values) if accumulate else out.copy_(values)


def every_case() -> list[Compressor]:
    cases = [compressors.make(name) for name in compressors.names()]
    cases += [compressors.make(name, **options) for name, sets in OPTION_SETS.items() for options in sets]
    return [*cases, Halving()]


CASES = every_case()


def marks(codec: Compressor) -> list[pytest.MarkDecorator]:
    """Mark cases that compile code for each option set; `tests/compressors/test_published.py` runs all of them."""
    default = codec.options == compressors.describe(codec.name).options if codec.name in compressors.names() else True
    return [] if default or not isinstance(codec, TracedCompressor) else [pytest.mark.ci]


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Make all compressors and residual policies use the kernels of this backend."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("gradwire.compressors", "gradwire.residuals")) and hasattr(module, "kernels"):
            monkeypatch.setattr(module, "kernels", BACKENDS[backend])
