"""Benchmark of kernels: every CPU kernel on one thread, alternating with copies of the same memory.

If torch has an obvious equivalent, that is the rival. `gradwire.bench.measure` explains the figures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from gradwire.bench.measure import Case, KernelTiming, Mixes, measure
from gradwire.compressors.support.thc_tables import optimal
from gradwire.core.errors import UnknownNameError
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import BlockLayout, num_sign_words
from gradwire.tuning.timing import single_thread

_BLOCK = 1024
_RANKS = 4
_KEPT = (0.001, 0.01, 0.1)


class _Buffers:
    """Memory shared by all cases, allocated at first use."""

    def __init__(self, size: int) -> None:
        self.length = size // 4 // _BLOCK * _BLOCK
        self.x = np.random.default_rng(0).standard_normal(self.length, np.float32)
        self.y = np.zeros(self.length, np.float32)
        self.source = torch.from_numpy(self.x)
        self.target = torch.from_numpy(self.y)

    @functools.cached_property
    def bfloat16(self) -> np.ndarray:
        out = np.empty(self.length, np.uint16)
        kernels.cast(self.x, out)
        return out

    @functools.cached_property
    def scales(self) -> np.ndarray:
        out = np.empty(self.length // _BLOCK, np.float32)
        kernels.block_abs_max(self.x, _BLOCK, out)
        return out / np.float32(127)

    def bytes(self, length: int, dtype: type = np.uint8) -> np.ndarray:
        return np.ones(length, dtype)  # not zeros: untouched zeros are one page, mapped many times


def _sweeps(b: _Buffers) -> Iterator[Case]:
    half = b.bytes(b.length, np.uint16)
    torch_half = torch.from_numpy(half.view(np.int16)).view(torch.bfloat16)
    yield Case(
        "cast to bf16", "float32", 6, "copy",
        lambda: kernels.cast(b.x, half), "Tensor.to", lambda: torch_half.copy_(b.source),
    )  # fmt: skip
    yield Case("cast from bf16", "bfloat16", 6, "copy", lambda: kernels.cast(b.bfloat16, b.y))
    yield Case(
        "compensate in place", "float32", 12, "add",
        lambda: kernels.compensate(b.x, 0.5, b.y, b.y),
        "add, abs, max", lambda: b.target.add_(b.source, alpha=0.5).abs().max(),
    )  # fmt: skip
    yield Case(
        "accumulate", "float32", 12, "add",
        lambda: kernels.accumulate(b.x, b.y), "add_", lambda: b.target.add_(b.source),
    )  # fmt: skip


def _reductions(b: _Buffers) -> Iterator[Case]:
    x, t = b.x, b.source
    yield Case("abs_max", "float32", 4, "read", lambda: kernels.abs_max(x), "abs, max", lambda: t.abs().max())
    yield Case(
        "count_nonfinite", "float32", 4, "read",
        lambda: kernels.count_nonfinite(x), "isfinite, sum", lambda: t.isfinite().sum(),
    )  # fmt: skip
    out = np.empty(b.length // _BLOCK, np.float32)
    yield Case("block_abs_max", "float32", 4, "read", lambda: kernels.block_abs_max(x, _BLOCK, out))


def _bit_fields(b: _Buffers) -> Iterator[Case]:
    q = b.bytes(b.length)
    for bits in (1, 2, 4):
        packed = b.bytes(b.length * bits // 8)
        pack = functools.partial(kernels.pack_bits, q, bits, packed)
        unpack = functools.partial(kernels.unpack_bits, packed, bits, q)
        yield Case(f"pack_bits {bits}", "uint8", 1 + bits / 8, "read", pack)
        yield Case(f"unpack_bits {bits}", "uint8", 1 + bits / 8, "write", unpack)


def _ternary(b: _Buffers) -> Iterator[Case]:
    packed = b.bytes(-(-b.length // 5))
    peers = [np.full(packed.size, 121, np.uint8) for _ in range(_RANKS)]
    scales = np.ones(_RANKS, np.float32)
    yield Case("pack_ternary", "float32", 4.2, "read", lambda: kernels.pack_ternary(b.x, 5.0, packed))
    yield Case(
        "pack_ternary in place", "float32", 8.2, "update",
        lambda: kernels.pack_ternary(b.y, 5.0, packed, b.y),
    )  # fmt: skip
    yield Case("unpack_ternary", "float32", 4.2, "write", lambda: kernels.unpack_ternary(packed, 5.0, b.y))
    yield Case(
        "unpack_ternary accumulate", "float32", 8.2, "update",
        lambda: kernels.unpack_ternary(packed, 5.0, b.y, accumulate=True),
    )  # fmt: skip
    yield Case(
        f"unpack_ternary_sum of {_RANKS}", "float32", 4 + 0.2 * _RANKS, "write",
        lambda: kernels.unpack_ternary_sum(peers, scales, b.y),
    )  # fmt: skip


def _zero_runs(b: _Buffers) -> Iterator[Case]:
    """Rates refer to the float32 gradient that the bytes represent."""
    packed = b.bytes(-(-b.length // 5))
    encoded, decoded = packed.copy(), packed.copy()
    for M in (3.0, 4.0, 6.0):
        kernels.pack_ternary(b.x, M, packed)
        zeros = float((packed == 121).mean())
        length = kernels.zero_run_encode(packed, encoded)
        source = packed.copy()

        def both(M: float = M) -> None:
            kernels.pack_ternary(b.x, M, packed)
            kernels.zero_run_encode(packed, encoded)

        encode = functools.partial(kernels.zero_run_encode, source, encoded)
        decode = functools.partial(kernels.zero_run_decode, encoded[:length].copy(), decoded)
        label = f"{zeros:.0%} zero bytes"
        yield Case(f"zero_run_encode, {label}", "float32", 4, "read", encode)
        yield Case(f"zero_run_decode, {label}", "float32", 4, "read", decode)
        yield Case(f"pack_ternary, zero_run_encode, {label}", "float32", 4, "read", both)


def _int8(b: _Buffers) -> Iterator[Case]:
    q, accumulator = b.bytes(b.length, np.int8), b.bytes(b.length, np.int16)
    peers = [q.copy() for _ in range(_RANKS)]
    scales, x, y = b.scales, b.x, b.y
    steps = torch.from_numpy(scales)[:, None]
    torch_q = torch.from_numpy(q).view(-1, _BLOCK)

    def torch_quantize() -> None:
        torch_q.copy_((b.source.view(-1, _BLOCK) * (1 / steps)).round_().clamp_(-127, 127))

    yield Case(
        "quantize_int8 nearest", "float32", 5, "read",
        lambda: kernels.quantize_int8(x, scales, _BLOCK, 1, 0, q, False), "mul, round, clamp, to", torch_quantize,
    )  # fmt: skip
    yield Case(
        "quantize_int8 stochastic", "float32", 5, "read",
        lambda: kernels.quantize_int8(x, scales, _BLOCK, 1, 0, q, True),
    )  # fmt: skip
    yield Case(
        "quantize_int8 nearest in place", "float32", 9, "update",
        lambda: kernels.quantize_int8(y, scales, _BLOCK, 1, 0, q, False, y),
    )  # fmt: skip
    yield Case(
        "quantize_int8 stochastic in place", "float32", 9, "update",
        lambda: kernels.quantize_int8(y, scales, _BLOCK, 1, 0, q, True, y),
    )  # fmt: skip
    yield Case(
        "dequantize_int8", "float32", 5, "write",
        lambda: kernels.dequantize_int8(q, scales, _BLOCK, y),
        "mul", lambda: torch.mul(torch_q, steps, out=b.target.view(-1, _BLOCK)),
    )  # fmt: skip
    yield Case(
        "dequantize_int8 accumulate", "float32", 9, "update",
        lambda: kernels.dequantize_int8(q, scales, _BLOCK, y, accumulate=True),
    )  # fmt: skip
    yield Case(
        f"dequantize_int8_sum of {_RANKS}", "float32", 4 + _RANKS, "copy",
        lambda: kernels.dequantize_int8_sum(peers, [scales] * _RANKS, _BLOCK, y),
    )  # fmt: skip
    yield Case("add_int8", "int8", 5, "add", lambda: kernels.add_int8(q, accumulator))
    yield Case("finalize_int8", "int16", 6, "copy", lambda: kernels.finalize_int8(accumulator, scales, _BLOCK, 0.25, y))


def _blocks(b: _Buffers) -> Iterator[Case]:
    """Kernels of THC with 4 bits and granularity 30. Unless stated otherwise, rates refer to the float32 gradient."""
    for block in (_BLOCK, 4 * _BLOCK, 1 << 20):
        whole = b.y[: b.length // block * block]
        count = 8 * whole.size / b.length
        transform = functools.partial(kernels.hadamard, whole, block)
        yield Case(f"thc hadamard {block}", "float32", count, "update", transform)
    sums = np.empty(b.length // _BLOCK)
    yield Case("thc block_square_sums", "float32", 4, "read", lambda: kernels.block_square_sums(b.x, _BLOCK, sums))
    signs = np.empty(num_sign_words(b.length), np.uint32)
    kernels.random32(1, 0, signs)
    blocks, work = BlockLayout(b.length, _BLOCK, True, signs, 0), np.empty(_BLOCK, np.float32)
    table = np.array(optimal(4, 30, 1 / 32).values, np.uint32)
    one = np.ones(b.length // _BLOCK, np.float32)
    units, lows, rates = one / 32, -2 * one, 7 * one
    packed, accumulator = b.bytes(b.length // 2), b.bytes(b.length)

    def encode(x: np.ndarray, residual: np.ndarray | None = None) -> None:
        kernels.encode_indices(
            x, blocks, units, lows, rates, table, 4, 1, 0, work, packed, one, 0 * one, residual
        )  # fmt: skip

    yield Case("thc encode_indices 4", "float32", 4.5, "read", lambda: encode(b.x))
    yield Case("thc encode_indices 4 in place", "float32", 8.5, "update", lambda: encode(b.y, b.y))
    lookup = functools.partial(kernels.lookup_indices, packed, 4, table, accumulator)
    yield Case("thc lookup_indices 4", "uint8", 1.5, "write", lookup)
    yield Case("thc lookup_indices 4 accumulate", "uint8", 2.5, "update", lambda: lookup(accumulate=True))
    yield Case(
        "thc finalize_blocks", "uint8", 5, "write",
        lambda: kernels.finalize_blocks(accumulator, blocks, one, one, 0 * one, work, b.y),
    )  # fmt: skip


def _random(b: _Buffers) -> Iterator[Case]:
    out = b.bytes(b.length, np.uint16)
    target = torch.from_numpy(out.view(np.int16))
    yield Case(
        "random16", "uint16", 2, "write",
        lambda: kernels.random16(1, 0, out), "random_", lambda: target.random_(-32768, 32767),
    )  # fmt: skip


def _selection(b: _Buffers) -> Iterator[Case]:
    for kept in _KEPT:
        k = int(b.length * kept)
        indices, values = b.bytes(k, np.uint32), b.bytes(k, np.float32)
        kernels.top_k(b.x, k, indices)
        kernels.take(b.x, indices, values)
        torch_indices, torch_values = torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(values)
        top_k = functools.partial(kernels.top_k, b.x, k, indices)
        take = functools.partial(kernels.take, b.x, indices, values)
        scatter = functools.partial(kernels.scatter_sum, [indices], [values], b.y)

        def torch_top_k(k: int = k) -> object:
            return b.source.abs().topk(k, sorted=False)

        def torch_scatter(where: torch.Tensor = torch_indices, what: torch.Tensor = torch_values) -> object:
            return b.target.zero_().index_add_(0, where, what)

        # The bound assumes an exact selection in two passes.
        yield Case(f"top_k {kept:.1%}", "float32", 8 + 8 * kept, "read", top_k, "abs, topk", torch_top_k)
        yield Case(f"take {kept:.1%}", "float32", 72 * kept, "read", take)
        yield Case(
            f"scatter_sum {kept:.1%}", "float32", 4 + 72 * kept, "write", scatter, "zero_, index_add_", torch_scatter
        )


_GROUPS = (
    _sweeps, _reductions, _bit_fields, _ternary, _zero_runs, _int8, _blocks, _random, _selection,
)  # fmt: skip


def _cases(buffers: _Buffers, only: str | None) -> Iterator[Case]:
    names = []
    for case in (case for group in _GROUPS for case in group(buffers)):
        names.append(case.kernel)
        if only is None or only in case.kernel:
            yield case
    if not any(only is None or only in name for name in names):
        raise UnknownNameError("kernel", only, names)


def run(size_mb: int = 256, repeats: int = 7, only: str | None = None) -> list[KernelTiming]:
    """Measure the kernels of `gradwire.kernels.active` on one thread.

    Args:
        size_mb: Size of the float32 gradient in MB (10^6 bytes). Below about ten times the size of the last-level
            cache, the figures are those of the cache.
        repeats: Timed runs of each kernel, and of the copies between them.
        only: Measure only kernels whose name contains this.

    Raises:
        UnknownNameError: There is no such kernel.
    """
    with single_thread():
        buffers = _Buffers(size_mb * 1_000_000)
        mixes = Mixes(buffers.x)
        return [measure(case, mixes, buffers.x, repeats) for case in _cases(buffers, only)]
