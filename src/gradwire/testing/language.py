"""Compressors in the language: generated code and the oracle give the same bits."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import key_words
from gradwire.core.spec import TensorSpec, as_array
from gradwire.lang import cache, interpret
from gradwire.lang.emit import statics
from gradwire.lang.interpret import Environment
from gradwire.lang.operators.arithmetic import static_values
from gradwire.lang.targets import triton
from gradwire.testing.cases import EDGE_TENSORS, context, heavy_tailed, normal, reduced
from gradwire.testing.checks import about, check, expect

_SIZES = (0, 1, 63, 65, 1023, 1024, 1025, 5121, 30_000)
_SIZES_INTERPRETED = (0, 1, 65, 1025)


def _is_traced(codec: Compressor) -> bool:
    return isinstance(codec, TracedCompressor)


@check(_is_traced)
def generated_code_for_the_cpu_gives_what_the_oracle_gives(codec: Compressor) -> None:
    """Payload, residual and decoded tensor are those of gradwire.lang.interpret, with and without a residual."""
    assert isinstance(codec, TracedCompressor)
    for size in _SIZES:
        for family in (normal, heavy_tailed):
            with about(f"{size} {family.__name__} elements"):
                _like_the_oracle(codec, family(size))
    for name, make in EDGE_TENSORS.items():
        with about(name):
            _like_the_oracle(codec, make())


def _like_the_oracle(codec: TracedCompressor, grad: torch.Tensor) -> None:
    ctx = context(grad, spec=TensorSpec(tuple(grad.shape)), offset=5)
    x, size = as_array(grad), grad.numel()

    def environment() -> Environment:
        return Environment(size, ctx.shared_key, ctx.private_key, ctx.offset, ctx.step)

    own = as_array(normal(size, seed=1))
    for before, stats in [(None, []), (own, [])] + [(own, reduced(codec, [grad]))] * codec.needs_stats:
        wanted = interpret.encode(codec.program, x, environment(), 0.5, before, stats)
        residual = np.empty(size, np.float32)
        payload = codec.encode(grad, ctx, stats, scale=0.5, residual_in=before, residual_out=residual)
        expect((wanted is None) == payload.nonfinite, "the mark of a gradient that is not finite differs")
        if wanted is None:
            continue
        expect(bytes(payload.body) == wanted[0].tobytes(), _difference("payload", payload.body, wanted[0]))
        expect(residual.tobytes() == wanted[1].tobytes(), _difference("residual", residual, wanted[1]))
        decoded = interpret.decode(codec.program, wanted[0], environment(), stats)
        found = as_array(codec.decode(payload, ctx, stats=stats))
        expect(found.tobytes() == decoded.tobytes(), _difference("decoded tensor", found, decoded))


def _device() -> str | None:
    """Device for generated Triton code: a GPU, or with TRITON_INTERPRET=1 the CPU; None if there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else None


@check(lambda codec: _is_traced(codec) and _device() is not None)
def generated_code_for_gpus_gives_what_the_oracle_gives(codec: Compressor) -> None:
    """Payload, residual and decoded tensor of Triton code, on a GPU or interpreted (TRITON_INTERPRET=1)."""
    assert isinstance(codec, TracedCompressor)
    device = _device()
    assert device is not None
    module = cache.load(f"{codec.name}_triton", triton.emit(codec.program))
    for size in _SIZES_INTERPRETED if device == "cpu" else _SIZES:
        for family in (normal, heavy_tailed):
            with about(f"{size} {family.__name__} elements on {device}"):
                _triton_like_the_oracle(codec, module, family(size), torch.device(device))


def _triton_like_the_oracle(
    codec: TracedCompressor, module: ModuleType, grad: torch.Tensor, device: torch.device
) -> None:
    size, ctx = grad.numel(), context(grad, offset=5)
    environment = functools.partial(Environment, size, ctx.shared_key, ctx.private_key, ctx.offset, ctx.step)
    wanted = interpret.encode(codec.program, as_array(grad), environment())
    assert wanted is not None
    static = static_values(statics(codec.program), size, ctx.step)
    words = key_words(ctx)
    residual, out = torch.empty(size, device=device), torch.empty(size, device=device)
    body = module.encode(grad.to(device), 1.0, None, residual, None, words, ctx.offset, static)
    expect(body is not None, "a finite gradient was marked as not finite")
    sent, left = body.cpu().numpy(), as_array(residual.cpu())
    expect(sent.tobytes() == wanted[0].tobytes(), _difference("payload", sent, wanted[0]))
    expect(left.tobytes() == wanted[1].tobytes(), _difference("residual", left, wanted[1]))
    expect(module.decode(body, out, None, None, words, ctx.offset, static), "decode refuses what encode wrote")
    decoded, found = interpret.decode(codec.program, wanted[0], environment()), as_array(out.cpu())
    expect(found.tobytes() == decoded.tobytes(), _difference("decoded tensor", found, decoded))


def _difference(what: str, found: np.ndarray, wanted: np.ndarray) -> str:
    if found.size != wanted.size:
        return f"the {what} has {found.size} values, but the oracle's has {wanted.size}"
    places = np.flatnonzero(found != wanted)
    first = int(places[0]) if places.size else 0
    values = f"{found[first]!r} instead of {wanted[first]!r}" if places.size else "signs of zeros"
    return f"the {what} differs from the oracle's in {places.size} of {found.size} values, first at {first}: {values}"
