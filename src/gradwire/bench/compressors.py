"""Benchmark of compressors: encode and decode with every compressor, compared with a copy and with plain torch.

Each compressor encodes without error feedback and with it (including compensation and the new residual), decodes, and
decodes the payloads of four ranks into their sum. The bytes that must move follow from the number of passes over the
gradient: one if a scale belongs to a block or is given, two if all elements must be read first. The time is that of the
whole public call, with checks and allocation of the payload. `gradwire.bench.measure` explains the figures.
"""
# Shapes: N = elements of the gradient, W = ranks

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import copy
from functools import partial

import numpy as np
import torch

from gradwire.bench.measure import Case, KernelTiming, Mixes, measure
from gradwire.bench.rivals import RIVALS
from gradwire.compressors import make, names
from gradwire.compressors.base import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.lang.ir import ELEMENTS
from gradwire.lang.passes import Sweep, schedule
from gradwire.tuning.timing import single_thread

_BLOCK = 1024
_RANKS = 4
_FIRST_USE_SECONDS = 600.0  # limit
# Passes over the gradient of compressors that are not written in the language.
_PASSES = {"none": 1, "fp16": 1, "bf16": 1, "int8shared": 1, "topk": 2, "threelc": 2, "powersgd": 2}
_PASSES |= {"thc": 2, "uthc": 2}
_PASSES |= {"lossless": 1, "gcomp": 1}
# Beside the defaults on float32.
_MORE = (("lossless", torch.bfloat16), ("lossless:code=fixed", torch.float32), ("lossless:code=fixed", torch.bfloat16))


class _Data:
    """A gradient, memory for residuals and results, and a context."""

    def __init__(self, size_mb: int) -> None:
        self.length = size_mb * 1_000_000 // 4 // _BLOCK * _BLOCK
        self.x = np.random.default_rng(0).standard_normal(self.length, np.float32)
        self.work = np.zeros(self.length, np.float32)
        self.grad, self.out = torch.from_numpy(self.x), torch.zeros(self.length)
        self.total = torch.from_numpy(self.work)  # of ranks
        self.ctx = self._context(torch.float32)

    def cast(self, dtype: torch.dtype) -> _Data:
        """The same with a gradient of another type."""
        if dtype == torch.float32:
            return self
        found = copy(self)
        found.grad, found.out, found.ctx = self.grad.to(dtype), self.out.to(dtype), self._context(dtype)
        return found

    def _context(self, dtype: torch.dtype) -> Context:
        return Context("layer.weight", spec=TensorSpec((self.length // _BLOCK, _BLOCK), dtype))


def _cases(spec: str, data: _Data) -> Iterator[Case]:
    codec, element = make(spec), data.grad.itemsize
    dtype = str(data.grad.dtype).removeprefix("torch.")
    payload = codec.encode(data.grad, data.ctx)
    if payload.nonfinite:
        raise ValueError(f"{codec!r} found the benchmark's gradient not finite.")
    bits = payload.body.nbytes / data.length
    passes = num_passes(codec)
    rival = RIVALS.get(codec.name)
    name = "torch operations" if rival else ""

    def encode_with_feedback() -> object:
        # The old residual is zero, so that it does not grow from run to run.
        return codec.encode(data.grad, data.ctx, scale=0.25, residual_out=data.work)

    yield Case(
        f"{spec} encode", dtype, element * passes + bits, "read",
        lambda: codec.encode(data.grad, data.ctx), name, rival and (lambda: rival(data.grad)),
    )  # fmt: skip
    if codec.default_feedback == "error":
        # Without an old residual: gradient read, compensated gradient written and read, residual written. The rival
        # adds a residual, but does not compute the new one.
        yield Case(
            f"{spec} encode with feedback", dtype, 8 * passes + bits, "update", encode_with_feedback,
            name, rival and (lambda: rival(data.out.add_(data.grad))),
        )  # fmt: skip
    touched = element + bits
    yield Case(f"{spec} decode", dtype, touched, "write", lambda: codec.decode(payload, data.ctx, out=data.out))
    yield Case(
        f"{spec} decode sum of {_RANKS}", dtype, 4 + _RANKS * bits, "write",
        lambda: codec.decode_sum([payload] * _RANKS, [data.ctx] * _RANKS, data.total),
    )  # fmt: skip


def num_passes(codec: Compressor) -> int:
    """Number of passes over the gradient in an encoder. All work on a block in the cache counts as one."""
    if not isinstance(codec, TracedCompressor):
        return _PASSES[codec.name]
    steps = [step for step in schedule(codec.program) if isinstance(step, Sweep) and step.space == ELEMENTS]
    return sum(bool(step.sinks or step.packs or step.block_nodes) for step in steps)


def matching(only: str | None) -> list[str]:
    """Names of compressors that contain `only`, or all names for None.

    Raises:
        UnknownNameError: There is none.
    """
    found = [name for name in names() if only is None or only in name]
    if not found:
        raise UnknownNameError("compressor", only, names())
    return found


def run(size_mb: int = 256, repeats: int = 7, only: str | None = None) -> list[KernelTiming]:
    """Measure every compressor on one thread; see `gradwire.bench.kernels.run`."""
    chosen = matching(only)
    with single_thread():
        data = _Data(size_mb)
        mixes = Mixes(data.x)
        more = [(spec, dtype) for spec, dtype in _MORE if spec.partition(":")[0] in chosen]
        every = [(name, torch.float32) for name in chosen] + more
        cases = [case for spec, dtype in every for case in _cases(spec, data.cast(dtype))]
        return [measure(case, mixes, data.x, repeats) for case in cases]


def first_uses(only: str | None = None) -> Iterator[tuple[str, float, float]]:
    """For each compressor: name, seconds of its first use in a new process with empty caches, and with warm ones."""
    code = f"import sys; from {__name__} import first_use; print(first_use(sys.argv[1]))"
    for name in matching(only):
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"NUMBA_CACHE_DIR": f"{folder}/numba", "GRADWIRE_CACHE_DIR": folder}
            command = [sys.executable, "-c", code, name]
            run = partial(subprocess.check_output, command, env=env, text=True, timeout=_FIRST_USE_SECONDS)
            cold, warm = (float(run()) for _ in range(2))
        yield name, cold, warm


def first_use(name: str) -> float:
    """Seconds of the first encodes and decodes of a small gradient in this process, without imports."""
    codec, grad = make(name), torch.randn(1000)
    ctx = Context("layer.weight", spec=TensorSpec((1000,)))
    start = time.perf_counter()
    codec.decode(codec.encode(grad, ctx), ctx)
    residual = np.zeros(1000, np.float32)
    codec.encode(grad, ctx, residual_in=residual, residual_out=residual)
    codec.decode_sum([codec.encode(grad, ctx)] * 2, [ctx] * 2, torch.empty(1000))
    return time.perf_counter() - start
