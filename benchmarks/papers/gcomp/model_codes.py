"""Codes of exponents that follow from a model of the distribution, as in ZipCCL, against counted ones.

Each chunk of 16,384 elements has a scale: the mean of its exponents, which `lossless` computes anyway. Assume that its
elements are normal, Laplacian, or of a generalized normal distribution of some shape: then the scale yields the share
of each exponent, and these a prefix code, without any counting. Compared are, in bits per element:

    default table      what `lossless` begins with: one code, shifted by whole exponents to the chunk's mean
    table of a step before   a code of the tensor's own, counted at the recorded step before; what `refresh` hopes for
    normal, Laplace    codes of the model, for the scale to an eighth of an exponent
    best shape         the best for each chunk of five shapes of the generalized normal distribution. A choice by the
                       outcome: what any test that chooses a shape could gain at most
    entropy of chunks  of each chunk's exponents, at which any code of exponents ends that counts chunks for free

Zeros are a word of each code. Their share is a sixteenth for all codes but counted ones. In the columns *with zeros
counted*, it is the nearest of 1/16, 1/2 and 15/16 for each chunk: one number that a kernel has to count.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.options import Cifar10, Sst2
from benchmarks.papers.gcomp.gradients import coded_bits
from benchmarks.papers.gcomp.models import resnet, transformer
from benchmarks.papers.gcomp.zeros import recorded
from gradwire.bench.workloads import make_workload
from gradwire.compressors.support import exponent_prior
from gradwire.kernels.float_format import CHUNK
from gradwire.kernels.prefix_code import NUM_SYMBOLS, PrefixCode

STEPS = (2, 8, 50, 100)
BATCH, RANKS = 32, 4
PHASES = 8  # scales for each octave
CENTER = 128
NORMAL, LAPLACE = 2.0, 1.0
SHAPES = (0.5, 0.7, LAPLACE, 1.4, NORMAL)
ZEROS = (1 / 16, 1 / 2, 15 / 16)
NAMES = (
    "default table", "table of a step before", "normal", "Laplace", "best shape", "normal, zeros counted",
    "Laplace, zeros counted", "best shape, zeros counted", "entropy of chunks",
)  # fmt: skip
Row = dict[str, Any]


def shares(shape: float, scale: float) -> np.ndarray:
    """Shares of the exponents of |x| = 2^scale · y, where y has density ~ exp(−y^shape), float64[NUM_SYMBOLS − 1]."""
    edges = torch.arange(NUM_SYMBOLS, dtype=torch.float64) - CENTER - scale
    below = torch.special.gammainc(torch.tensor(1 / shape, dtype=torch.float64), (2.0**edges) ** shape)
    return np.diff(below.numpy())


@functools.cache
def offset(shape: float) -> float:
    """Mean exponent of y, as a real number: the mean of floor(log2 |y|) over all phases of a scale."""
    symbols = np.arange(NUM_SYMBOLS - 1) - CENTER
    means = [float(shares(shape, phase / 16) @ symbols) - phase / 16 for phase in range(16)]
    return float(np.mean(means))


@functools.cache
def code_of(shape: float, phase: int, zeros: float) -> PrefixCode:
    """Code for chunks whose mean exponent is `CENTER` + phase / `PHASES`."""
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    found = shares(shape, phase / PHASES - offset(shape))
    counts[: NUM_SYMBOLS - 1] = np.round(found * (1 - zeros) * 2**24)
    counts[0] = round(zeros * 2**24)
    return PrefixCode.of(counts)


class Chunk:
    """Exponents of a chunk.

    Attributes:
        exponents: Count of each exponent, int64[256].
        mean: Mean of the exponents above 0.
    """

    def __init__(self, x: np.ndarray) -> None:
        self.exponents = np.bincount((x.view(np.uint32) >> 23) & 0xFF, minlength=256)[:256]
        above = self.exponents[1:]
        self.mean = float(above @ np.arange(1, 256) / above.sum()) if above.any() else 1.0

    def counts(self, mean: int) -> np.ndarray:
        """Symbols where `mean` becomes `CENTER`. Zeros are symbol 0."""
        counts = np.zeros(NUM_SYMBOLS, np.int64)
        counts[1:256] = np.roll(self.exponents[1:], CENTER - mean)
        counts[0] = self.exponents[0]
        return counts

    def default_counts(self) -> np.ndarray:
        """Symbols as `lossless` has them."""
        return self.counts(round(self.mean))

    def modelled_bits(self, shape: float, counted: bool) -> float:
        """Bits with the code of a model."""
        eighths = round(self.mean * PHASES)
        zeros = ZEROS[0]
        if counted:
            share = self.exponents[0] / self.exponents.sum()
            zeros = min(ZEROS, key=lambda each: abs(each - share))
        return coded_bits(code_of(shape, eighths % PHASES, zeros), self.counts(eighths // PHASES))

    def entropy_bits(self) -> float:
        seen = self.exponents[self.exponents > 0]
        return float((seen * np.log2(seen.sum() / seen)).sum())


def chunks_of(grad: torch.Tensor) -> list[Chunk]:
    flat = grad.reshape(-1).numpy()
    return [Chunk(flat[start : start + CHUNK]) for start in range(0, flat.size, CHUNK)]


def bits_of(found: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> dict[str, float]:
    """Bits per element of each code, over all tensors. `before` are those of an earlier step."""
    bits = dict.fromkeys(NAMES, 0.0)
    prior = exponent_prior.code(torch.float32)
    for grad, earlier in zip(found, before, strict=True):
        known = np.sum([chunk.default_counts() for chunk in chunks_of(earlier)], axis=0)
        own = PrefixCode.of(known)
        for chunk in chunks_of(grad):
            counts = chunk.default_counts()
            bits["default table"] += coded_bits(prior, counts)
            bits["table of a step before"] += coded_bits(own, counts)
            bits["entropy of chunks"] += chunk.entropy_bits()
            for counted, suffix in ((False, ""), (True, ", zeros counted")):
                each = {shape: chunk.modelled_bits(shape, counted) for shape in SHAPES}
                bits[f"normal{suffix}"] += each[NORMAL]
                bits[f"Laplace{suffix}"] += each[LAPLACE]
                bits[f"best shape{suffix}"] += min(each.values())
    size = sum(grad.numel() for grad in found)
    return {name: value / size for name, value in bits.items()}


def text_gradients(steps: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Gradients of the matrices of the text workload, with its own optimizer, at steps counted from 1."""
    torch.manual_seed(0)
    workload = make_workload("text")
    model = workload.model()
    optimizer = workload.optimizer(model)
    for step in range(1, max(steps) + 1):
        batch = workload.batch(0, step, 0, RANKS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        if step in steps:
            grads = [parameter.grad for parameter in model.parameters() if parameter.dim() > 1]
            yield step, [grad.clone() for grad in grads if grad is not None]
        optimizer.step()


def run(cifar10: Cifar10, sst2: Sst2) -> Iterator[Row]:
    """Run all workloads. The first recorded step is only the one before the next."""
    sources: dict[str, Iterator[tuple[int, list[torch.Tensor]]]] = {"text": text_gradients(STEPS)}
    for training in (resnet(cifar10, BATCH), transformer(sst2, BATCH)):
        steps = recorded(training, STEPS)
        sources[training.name] = ((step, [grad for _, grad, _ in found]) for step, _, found in steps)
    for workload, source in sources.items():
        for (_, before), (step, found) in itertools.pairwise(source):
            fixed = {"workload": workload, "step": step, "dtype": "float32", "source": "measured", "ranks": 1}
            zeros = sum(int((grad == 0).sum()) for grad in found) / sum(grad.numel() for grad in found)
            yield {**fixed, "metric": "zeros", "method": "none", "value": zeros, "unit": "fraction"}
            for name, value in bits_of(found, before).items():
                yield {**fixed, "metric": "exponents", "method": name, "value": value, "unit": "bits"}
                ratio = (value + 24 * (1 - zeros)) / 32
                yield {**fixed, "metric": "ratio", "method": name, "value": ratio, "unit": "fraction"}


def table(rows: Sequence[Row]) -> str:
    """Markdown table: bits per exponent."""
    values = {(row["workload"], row["step"], row["method"]): row["value"] for row in rows if row["metric"] != "ratio"}
    where = list(dict.fromkeys(key[:2] for key in values))
    lines = [f"| | {' | '.join(f'{workload}, step {int(step)}' for workload, step in where)} |"]
    lines.append("|---" * (len(where) + 1) + "|")
    for name, text in (("none", "zeros"), *((name, name) for name in NAMES)):
        lines.append(f"| {text} | {' | '.join(f'{values[(*key, name)]:.2f}' for key in where)} |")
    return "\n".join(lines)
