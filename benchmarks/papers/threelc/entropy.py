"""Gain of an entropy stage instead of zero runs in 3LC: a prefix code over the 243 values of quartic bytes.

A ResNet learns CIFAR-10 with plain SGD in one process. Each gradient is encoded with 3LC without zero runs, with error
feedback. The bytes are counted unchanged (1.6 bits per element), with zero runs, with the prefix code of the same
step's bytes (the best possible, without its table), and with that of the previous step (which both ends could know).
Then one core codes the bytes of the last step in both ways, in the cache.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3.3, which uses zero runs because they are cheap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn import functional

import gradwire as gw
from benchmarks.data.cifar import ResNet, batch, load
from benchmarks.options import Cifar10
from gradwire.core.spec import TensorSpec
from gradwire.kernels import cpu as kernels
from gradwire.kernels.cpu.streams import BUFFER_BYTES, STRIDE, copy_streams, read_streams, write_streams
from gradwire.kernels.float_format import CHUNK, STREAMS
from gradwire.kernels.prefix_code import PrefixCode

SCALE_BYTES = 4
FIRST = 20  # residuals have grown by then


def quartic_bytes(sparsity: float, steps: int, data: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Quartic bytes of the gradients of each step, concatenated, and the number of elements."""
    torch.manual_seed(0)
    train, generator = load(data, "train"), torch.Generator().manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    codec = gw.make("threelc", sparsity=sparsity, zero_run=False)
    large = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    residuals = {name: torch.zeros_like(p) for name, p in large.items()}
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(train, torch.randint(0, len(train[1]), (32,), generator=generator), generator=generator)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        bodies = []
        for name, parameter in large.items():
            assert parameter.grad is not None, "every layer is used"
            ctx = gw.Context(name=name, step=step, spec=TensorSpec.of(parameter))
            residuals[name] += parameter.grad
            payload = codec.encode(residuals[name], ctx)
            residuals[name] -= codec.decode(payload, ctx)
            bodies.append(payload.body[SCALE_BYTES:])
        yield np.concatenate(bodies), sum(parameter.numel() for parameter in large.values())


def bits_a_step(sparsity: float, steps: int, data: Path) -> tuple[dict[str, list[float]], np.ndarray]:
    """Bits per element by stage and step, and the quartic bytes of the last step."""
    found: dict[str, list[float]] = {"quartic": [], "zero runs": [], "prefix code": [], "last step's prefix code": []}
    before: PrefixCode | None = None
    quartic = np.empty(0, np.uint8)
    for step, (quartic, elements) in enumerate(quartic_bytes(sparsity, steps, data)):
        counts = np.bincount(quartic, minlength=256)
        code = PrefixCode.of(counts)
        if step >= FIRST and before is not None:
            runs = kernels.zero_run_encode(quartic, np.empty_like(quartic))
            found["quartic"].append(8 * quartic.size / elements)
            found["zero runs"].append(8 * runs / elements)
            found["prefix code"].append(coded_bits(code, counts) / elements)
            found["last step's prefix code"].append(coded_bits(before, counts) / elements)
        before = code
    return found, quartic


def coded_bits(code: PrefixCode, counts: np.ndarray) -> float:
    """Bits that bytes with these counts take in a code."""
    return float((counts * (code.words[:256] >> np.uint32(24))).sum())


def speeds(quartic: np.ndarray) -> dict[str, float]:
    """Gigabytes of float32 per second that one core encodes and decodes, by stage, one chunk at a time."""
    chunk = np.resize(quartic, CHUNK)
    code = PrefixCode.of(np.bincount(chunk, minlength=256))
    symbols, lengths = chunk.astype(np.uint16), np.empty(STREAMS, np.int64)
    room, body = np.empty(STREAMS * BUFFER_BYTES, np.uint8), np.empty(STREAMS * BUFFER_BYTES, np.uint8)
    runs, back, specials = np.empty_like(chunk), np.empty(STREAMS * STRIDE, np.uint8), np.empty(CHUNK, np.int64)
    end = kernels.zero_run_encode(chunk, runs)

    def write() -> int:
        write_streams(symbols, CHUNK, code.words, room, lengths)
        return int(copy_streams(0, room, lengths, body, 0))

    stop = write()
    read_streams(body, 0, stop, CHUNK, code.lookup, code.lengths, back, specials)
    read = back.reshape(STREAMS, STRIDE)[:, : CHUNK // STREAMS].reshape(-1)
    assert np.array_equal(read, chunk), "a code that is read as it was written"
    return {
        "zero runs, encode": rate(lambda: kernels.zero_run_encode(chunk, runs)),
        "zero runs, decode": rate(lambda: kernels.zero_run_decode(runs[:end], chunk)),
        "prefix code, encode": rate(write),
        "prefix code, decode": rate(
            lambda: read_streams(body, 0, stop, CHUNK, code.lookup, code.lengths, back, specials)
        ),
    }


def rate(call: Callable[[], object]) -> float:
    """Gigabytes of float32 per second for a chunk of quartic bytes. The best of several rounds."""
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, time.perf_counter() - begun)
    return 100 * CHUNK * 5 * 4 / best / 1e9


def run(data: Cifar10, steps: Annotated[int, typer.Option(help="Training steps.")] = 120) -> Iterator[dict[str, Any]]:
    """Compute all figures."""
    for sparsity in (1.0, 1.5, 1.75, 1.9):
        found, quartic = bits_a_step(sparsity, steps, data)
        fixed = {"rate": "none", "ranks": 1, "dtype": "float32", "size": 5 * quartic.size}
        for stage, bits in found.items():
            method = f"threelc s={sparsity:g}, {stage}"
            yield {
                **fixed,
                "method": method,
                "metric": "bits",
                "value": np.mean(bits),
                "unit": "bit",
                "source": "measured",
            }
        for stage, speed in speeds(quartic).items():
            method = f"threelc s={sparsity:g}, {stage}"
            yield {**fixed, "method": method, "metric": "rate", "value": speed, "unit": "GB/s", "source": "measured"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each figure."""
    return "\n".join(f"{row['method']:42} {row['value']:7.3f} {row['unit']}" for row in rows)
