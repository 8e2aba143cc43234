"""What the contract suite runs over: compressors with option sets, kernel backends, and tensors that hurt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.compressors.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array, as_tensor
from gradwire.kernels import cpu, reference
from gradwire.wire.payload import Payload

# Every registered compressor has its defaults here, by `every_case`, and the option sets that change its format.
OPTION_SETS: dict[str, list[dict]] = {
    "int8": [
        {"block": 64, "stochastic": False},
        {"block": 100, "shared": True},
        {"block": 64, "shared": True, "stochastic": False},
    ],
    "topk": [{"ratio": 0.3}, {"ratio": 1.0}],
    "threelc": [{"sparsity": 1.75}, {"sparsity": 1.999999, "zero_run": False}],
    "minmax": [{"bits": 4}],
    "terngrad": [{"clip": 0.0}],
    "dgc": [{"ratio": 0.3, "sample": 0.1}],
    "adacomp": [{"block": 24, "threshold": 0.5}],
    "qsgd": [{"bits": 8, "block": 100}, {"bits": 2}],
    "randomk": [{"ratio": 0.5}],
}

BACKENDS = {"cpu": cpu, "reference": reference}


class Halving(Compressor):
    """The least that a user must write: elements halved, in float32. Runs through all defaults of the base class."""

    name = "halving"
    default_feedback = "error"

    def contraction(self, spec: TensorSpec) -> float:
        return 0.75

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        return 4 * spec.numel

    def encode(self, grad, ctx, stats=(), residual=None) -> Payload:
        half = as_array(grad.to(torch.float32)) * np.float32(0.5)
        if not np.isfinite(half).all():
            return Payload(np.empty(0, np.uint8), nonfinite=True)
        if residual is not None:
            residual[:] = as_array(grad.to(torch.float32)) - half
        return Payload(half.view(np.uint8))

    def decode(self, payload, ctx, out=None, accumulate=False, stats=()) -> torch.Tensor:
        if accumulate and (out is None or out.dtype != torch.float32):
            raise ValueError("Expected a float32 out to accumulate in.")
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
each_case = pytest.mark.parametrize("codec", CASES, ids=repr)


def draws(codec: Compressor) -> set[str]:
    """What an encoder draws at random: ``"rounding"`` of every element, or a ``"sample"`` that may change nothing."""
    if not isinstance(codec, TracedCompressor):
        return {"rounding"} if codec.unbiased and not codec.exact else set()
    operators = codec.program.operators
    return {kind for operator, kind in (("random", "rounding"), ("sample", "sample")) if operator in operators}


def selects(codec: Compressor) -> bool:
    """Whether an encoder looks for elements of a given rank."""
    if not isinstance(codec, TracedCompressor):
        return codec.name == "topk"
    return not {"sort", "top"}.isdisjoint(codec.program.operators)


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let all compressors and the feedback call the kernels of this backend."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("gradwire.compressors", "gradwire.feedback")) and hasattr(module, "kernels"):
            monkeypatch.setattr(module, "kernels", BACKENDS[backend])


def context(grad: torch.Tensor, **fields) -> Context:
    return Context(
        **{"name": "fc.weight", "step": 3, "world_size": 4, "seed": 7, "spec": TensorSpec.of(grad), **fields}
    )


def float32_context(grad: torch.Tensor, **fields) -> Context:
    """A context that decodes to float32, whatever `grad` is."""
    return context(grad, spec=TensorSpec(tuple(grad.shape)), **fields)


def reduced(codec: Compressor, grads: Sequence[torch.Tensor], scale: float = 1.0) -> list[np.ndarray]:
    """The preliminary round over the gradients of all ranks."""
    each = [codec.stats(grad, context(grad), scale) for grad in grads]
    combine = {"max": np.maximum, "min": np.minimum, "sum": np.add}
    return [combine[entry[0].reduction].reduce([stat.values for stat in entry]) for entry in zip(*each, strict=True)]


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def heavy_tailed(size: int, seed: int = 0) -> torch.Tensor:
    """Like a gradient: most elements small, a few large, a third exactly zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size) * np.exp(2 * rng.standard_normal(size))
    return torch.from_numpy((values * (rng.random(size) > 1 / 3)).astype(np.float32))


def strided(size: int) -> torch.Tensor:
    return normal(2 * size).reshape(2, size).T[:, 0]


_TINY = float(np.finfo(np.float32).smallest_subnormal)
_MAX = float(np.finfo(np.float32).max)

# Finite in float32.
EDGE_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(-2.5),
    "empty": lambda: torch.empty(0),
    "empty of three dimensions": lambda: torch.empty(3, 0, 2),
    "one element": lambda: torch.tensor([[3.0]]),
    "one zero": lambda: torch.zeros(1),
    "zeros": lambda: torch.zeros(77),
    "negative zeros": lambda: -torch.zeros(2048),
    "constant": lambda: torch.full((131,), 0.1),
    "negative constant": lambda: torch.full((131,), -0.1),
    "one of many": lambda: torch.eye(1000)[700].reshape(10, 100),
    "no negative": lambda: normal(100).abs(),
    "all negative": lambda: -normal(100).abs() - 1e-3,
    "subnormals": lambda: normal(200) * 1e-40,
    "smallest subnormal": lambda: torch.tensor([_TINY, -_TINY, 0.0, _TINY]),
    "largest": lambda: torch.tensor([_MAX, -_MAX, 1.0, 0.0, _MAX / 2]),
    "wide range": lambda: torch.tensor([1e-38, 1e38, -1e-20, 1.0, -1e38, 3e-45]),
    "just below a level": lambda: torch.tensor([0.99999994, 1.0, -0.99999994, 0.5, 0.49999997, -0.5]) * 127,
    "not contiguous": lambda: strided(65),
    "transposed": lambda: normal(15 * 9).reshape(15, 9).T,
    "many dimensions": lambda: normal(210).reshape(2, 3, 5, 7),
    "longer than a block": lambda: heavy_tailed(3 * 1024 + 5),
    "half precision": lambda: heavy_tailed(300).clamp(-1e4, 1e4).half(),
    "bfloat16": lambda: heavy_tailed(300).bfloat16(),
    "double precision": lambda: heavy_tailed(300).double() / 3,
}

NONFINITE_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "nan": lambda: normal(50).index_fill(0, torch.tensor([20]), torch.nan),
    "infinity": lambda: normal(3000).index_fill(0, torch.tensor([2999]), torch.inf),
    "negative infinity": lambda: normal(50).index_fill(0, torch.tensor([0]), -torch.inf),
    "opposite infinities": lambda: torch.tensor([torch.inf, -torch.inf, 0.0]),
    "scalar nan": lambda: torch.tensor(torch.nan),
    "half precision infinity": lambda: torch.tensor([1.0, torch.inf], dtype=torch.float16),
    "bfloat16 nan": lambda: torch.tensor([1.0, torch.nan], dtype=torch.bfloat16),
    "double precision nan": lambda: torch.tensor([1.0, torch.nan], dtype=torch.float64),
}


def bits(tensor: torch.Tensor) -> bytes:
    return as_array(tensor).tobytes()


def with_body(payload: Payload, body: bytes) -> Payload:
    """The payload with other bytes, read-only like all that comes out of a network buffer."""
    return replace(payload, body=np.frombuffer(body, np.uint8))
