"""Edge-case tensors, contexts, and what checks need to know about a compressor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import cpu, reference
from gradwire.lang.operators.base import used_operators
from gradwire.wire.payload import Payload

BACKENDS = {"cpu": cpu, "reference": reference}
EPSILON = 2.0**-23  # one float32 rounding
EMPTY = Payload(np.empty(0, np.uint8))


# -- tensors -------------------------------------------------------------------------------------------------


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
    "tall": lambda: heavy_tailed(60 * 17).reshape(60, 17),
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


# -- contexts and payloads -----------------------------------------------------------------------------------


def context(grad: torch.Tensor, **fields: Any) -> Context:
    """Return a context for `grad`, with these fields changed."""
    known: dict[str, Any] = {"name": "fc.weight", "step": 3, "world_size": 4, "seed": 7, "spec": TensorSpec.of(grad)}
    return Context(**{**known, **fields})


def float32_context(grad: torch.Tensor, **fields: Any) -> Context:
    """Return a context that decodes to float32, whatever the element type of `grad`."""
    return context(grad, spec=TensorSpec(tuple(grad.shape)), **fields)


def reduced(codec: Compressor, grads: Sequence[torch.Tensor], scale: float = 1.0) -> list[np.ndarray]:
    """Return the stats of all ranks' gradients, after the preliminary round."""
    each = [codec.stats(grad, context(grad), scale) for grad in grads]
    combine = {"max": np.maximum, "min": np.minimum, "sum": np.add}
    found = [combine[entry[0].reduction].reduce([stat.values for stat in entry]) for entry in zip(*each, strict=True)]
    return list(codec.finish_stats(found, TensorSpec.of(grads[0])))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(as_array(tensor).tobytes())


def with_body(payload: Payload, body: bytes) -> Payload:
    """Return the payload with other bytes, read-only as in a network buffer."""
    return replace(payload, body=np.frombuffer(body, np.uint8))


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Make all compressors and residual policies use the kernels of this backend."""
    modules = [
        module for key, module in list(sys.modules.items())
        if key.startswith(("gradwire.compressors", "gradwire.residuals")) and hasattr(module, "kernels")
    ]  # fmt: skip
    before = [module.kernels for module in modules]
    try:
        for module in modules:
            module.kernels = BACKENDS[name]  # type: ignore[attr-defined]
        yield
    finally:
        for module, kernels in zip(modules, before, strict=True):
            module.kernels = kernels  # type: ignore[attr-defined]


# -- properties of compressors -------------------------------------------------------------------------------


def is_cast(codec: Compressor) -> bool:
    """Whether a finite float32 element may become infinite in the payload."""
    return codec.name in ("fp16", "bf16")


def keeps_float32(codec: Compressor) -> bool:
    """Whether the difference between an element and its decoded value is always a float32."""
    return is_cast(codec) or codec.name in ("none", "topk")


def rounds_at_random(codec: Compressor) -> bool:
    """Whether an encoder rounds elements by random numbers that no other rank draws."""
    if not isinstance(codec, TracedCompressor):
        return (codec.unbiased and not codec.exact) or codec.name == "thc"
    return any(node.op == "random" and not node.attrs["shared"] for node in codec.program.encode_nodes())


def selects(codec: Compressor) -> bool:
    """Whether an encoder selects elements by their order of magnitude."""
    if not isinstance(codec, TracedCompressor):
        return codec.name == "topk"
    return not {"sort", "top"}.isdisjoint(used_operators(codec.program))
