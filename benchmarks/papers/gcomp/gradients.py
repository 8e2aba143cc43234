"""Effect of each part of `gcomp` on gradients of real trainings: figures 9, 12, 13 and 14 of its paper.

A ResNet-8 on CIFAR-10 and a transformer encoder with two layers on SST-2 are trained from scratch
(`benchmarks.papers.gcomp.models`), with SGD with momentum and with AdamW. At every tenth step, the gradients of all
matrices and convolutions, for a rank's batch of 32, are encoded as by one of four ranks on a ring. Levels are derived
where nothing else is said.

- *Rates* (figure 9): payload bytes over those of float32, in total, of exponents, and of the rest.
- *Levels* (figure 14): bytes of signs, mantissas and levels over those of float32, with one level (18 bits or none) and
  with four, with and without pruning of zeros.
- *Tables* (figure 13a): bits per exponent, coded as in the paper (the exponent itself) and as in gradwire (its distance
  from the chunk's mean), with a table from before the training (in the paper of the first recorded step, here the
  default) and with new tables every 50 steps: the paper's of this rank's gradients, gradwire's of the mean of four
  ranks, if they are better at the step after.
- *Escape* (figure 12): bits per exponent of four gradients, each with codes made for each, with Huffman's code and with
  one of at most 11 bits and an escape. Each symbol counts once more, so that Huffman's code has a word for all.
- *Decoding* (figure 13b): symbols per second, bit by bit with the tree, with one lookup per symbol, and as in gradwire.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.options import Cifar10, Sst2
from benchmarks.papers.gcomp import gradient_plots
from benchmarks.papers.gcomp.decoding import decoding_rates
from benchmarks.papers.gcomp.models import OPTIMIZERS, Training, trainings
from gradwire.compressors import make
from gradwire.compressors.lossless import Lossless
from gradwire.compressors.support import exponent_prior
from gradwire.compressors.support.gcomp_metric import guard
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.kernels import active as kernels
from gradwire.kernels.prefix_code import ESCAPE, NUM_SYMBOLS, RAW_BITS, PrefixCode

RANKS = 4
EVERY, REFRESH = 10, 50
LEAST_DECODED = 60_000
CHOSEN = ("SGD, momentum", "AdamW")
PACKINGS = {
    "lossless": "lossless", "lossless, default table": "lossless", "gcomp": "gcomp", "gcomp, default table": "gcomp",
    "gcomp, levels sent": "gcomp:levels=sent",
}  # fmt: skip
Figure = dict[str, Any]
_LOSSLESS = Lossless()


class Recorded(NamedTuple):
    """A gradient, the optimizer state for `gcomp`, and at steps that decide on tables the mean of all ranks."""

    name: str
    grad: torch.Tensor
    aux: dict[str, torch.Tensor]
    mean: torch.Tensor | None


def recorded(training: Training, optimizer: str, steps: int) -> Iterator[tuple[int, float, list[Recorded]]]:
    """Step, loss, and the gradients with more than one dimension."""
    torch.manual_seed(0)
    model = training.model()
    made = OPTIMIZERS[optimizer](model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    state = OptimizerState(made, named)

    def gradients(step: int, rank: int) -> tuple[float, list[torch.Tensor]]:
        inputs, targets = training.batch(0, step, rank)
        made.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.item(), [parameter.grad.reshape(-1).clone() for _, parameter in named if parameter.grad is not None]

    for step in range(steps + 1):
        decides = step % REFRESH in (0, 1)
        others = [gradients(step, rank)[1] for rank in range(1, RANKS)] if decides else []
        loss, own = gradients(step, 0)
        if decides or step % EVERY == 0:
            means = (
                [torch.stack(each).mean(0) for each in zip(own, *others, strict=True)] if decides else [None] * len(own)
            )
            found = zip(named, own, means, strict=True)
            yield (
                step,
                loss,
                [
                    Recorded(name, grad, state(name, ElementRange(0, grad.numel())), mean)
                    for (name, _), grad, mean in found
                ],
            )
        made.step()


# -- what one step's gradients take ------------------------------------------------------------------------------


def counts_of(grad: torch.Tensor) -> np.ndarray:
    """Symbols as gradwire codes them."""
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    kernels.exponent_counts(grad.numpy(), counts)
    return counts


def exponents_of(grad: torch.Tensor) -> np.ndarray:
    """Plain exponents. Subnormal numbers count as 0, as in the paper."""
    return np.bincount((grad.numpy().view(np.uint32) >> 23) & 0xFF, minlength=NUM_SYMBOLS)


def coded_bits(code: PrefixCode, counts: np.ndarray) -> float:
    """Bits that symbols with these counts take."""
    lengths = code.lengths.astype(np.float64)
    escaped = lengths[ESCAPE] + RAW_BITS
    lengths[(lengths == 0) | (np.arange(NUM_SYMBOLS) == ESCAPE)] = escaped
    return float(lengths @ counts)


def native_bits(source: np.ndarray, counts: np.ndarray) -> float:
    """Bits with Huffman's code of `source`. Each symbol counts once more, so that all have a word."""
    heap = [(int(weight) + 1, index, [index]) for index, weight in enumerate(source[:256])]
    heapq.heapify(heap)
    lengths = np.zeros(NUM_SYMBOLS)
    while len(heap) > 1:
        (a, tie, left), (b, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (a + b, tie, left + right))
    return float(lengths @ counts)


class Levels(NamedTuple):
    """Number of +0 elements, and number of other elements of each level."""

    zeros: int
    of: list[int]


def levels_of(each: Recorded) -> Levels:
    grad = each.grad.numpy() / np.float32(RANKS)
    kept = grad != 0
    if "numbers" not in each.aux:
        return Levels(int((~kept).sum()), [int(kept.sum()), 0, 0, 0])
    limits, factor = np.empty(grad.size, np.float32), guard(RANKS)
    moments = [each.aux[name].numpy() if name in each.aux else None for name in ("first", "second")]
    kernels.update_limits(each.aux["parameter"].numpy(), *moments, each.aux["numbers"].numpy(), limits)
    level = sum((np.abs(grad) * np.float32(factor * 64.0**n) < limits).astype(int) for n in (1, 2, 3))
    return Levels(int((~kept).sum()), np.bincount(level[kept], minlength=4).tolist())


def mantissa_bytes(found: Levels, several: bool, pruned: bool) -> float:
    """Signs, mantissas and levels."""
    of = [*found.of]
    if not pruned:
        of[3] += found.zeros  # of a zero everything may be cut, but for its sign
    flag = 2 if several else 1
    widths = (24, 18, 12, 6) if several else (24, 24, 24, 6)
    return sum(count * (flag + width) for count, width in zip(of, widths, strict=True)) / 8


def step_figures(step: int, loss: float, found: list[Recorded], codes: Codes) -> Iterator[Figure]:
    """All figures that are recorded by step."""
    plain, size = sum(each.grad.nbytes for each in found), sum(each.grad.numel() for each in found)
    packed = dict.fromkeys(PACKINGS, 0)
    exponents = dict.fromkeys(("paper, static", "paper, dynamic", "gradwire, static", "gradwire, dynamic"), 0.0)
    mantissas: dict[str, float] = {}
    symbols = 0.0
    for each in found:
        table = codes.tables.get(each.name)
        for method, spec in PACKINGS.items():
            state, aux = None if method.endswith("table") else table, each.aux if "gcomp" in spec else {}
            ctx = Context(each.name, world_size=RANKS, spec=TensorSpec.of(each.grad), aux=aux, state=state)
            packed[method] += make(spec).encode(each.grad, ctx, scale=1 / RANKS).body.nbytes
        own, raw = counts_of(each.grad), exponents_of(each.grad)
        prior = exponent_prior.code(torch.float32)
        fresh = _LOSSLESS.code(torch.float32, table)
        symbols += coded_bits(fresh, own)
        exponents["gradwire, static"] += coded_bits(prior, own)
        exponents["gradwire, dynamic"] += coded_bits(fresh, own)
        exponents["paper, static"] += coded_bits(codes.first, raw)
        exponents["paper, dynamic"] += coded_bits(codes.now, raw)
        levels = levels_of(each)
        for several in (False, True):
            for pruned in (False, True):
                name = f"{'four levels' if several else 'one level'}{', zeros pruned' if pruned else ''}"
                mantissas[name] = mantissas.get(name, 0.0) + mantissa_bytes(levels, several, pruned)
        mantissas["zeros pruned"] = mantissas.get("zeros pruned", 0.0) + 3 * sum(levels.of)
    for name, nbytes in packed.items():
        yield {"metric": "rate", "method": name, "value": nbytes / plain, "unit": "fraction"}
    yield {"metric": "rate", "method": "gcomp, exponents", "value": symbols / 8 / plain, "unit": "fraction"}
    rest = packed["gcomp"] - symbols / 8
    yield {"metric": "rate", "method": "gcomp, all but exponents", "value": rest / plain, "unit": "fraction"}
    for name, nbytes in mantissas.items():
        yield {"metric": "mantissas", "method": name, "value": nbytes / plain, "unit": "fraction"}
    for name, bits in exponents.items():
        yield {"metric": "exponents", "method": name, "value": bits / size, "unit": "bits"}
    zeros = sum(int((each.grad == 0).sum()) for each in found)
    yield {"metric": "zeros", "method": "none", "value": zeros / size, "unit": "fraction"}
    yield {"metric": "loss", "method": "none", "value": loss, "unit": "nat"}


class Codes:
    """The tables in use: one for all tensors for the paper's exponents, one for each tensor for ours."""

    def __init__(self, found: list[Recorded]) -> None:
        self.first = self.now = self._of_all(found)
        self.tables: dict[str, np.ndarray] = {}

    def after(self, step: int, found: list[Recorded]) -> None:
        """The tables after a step, as `lossless` finds them."""
        if step % REFRESH == 0:
            self.now = self._of_all(found)
        for each in found:
            if each.mean is None:
                continue
            state = self.tables.get(each.name)
            ctx = Context(each.name, step=step + 1, spec=TensorSpec.of(each.mean), state=state)
            table = _LOSSLESS.next_state(each.mean.numpy(), ctx)
            if table is not None:
                self.tables[each.name] = table

    @staticmethod
    def _of_all(found: list[Recorded]) -> PrefixCode:
        return PrefixCode.of(np.sum([exponents_of(each.grad) for each in found], axis=0))


# -- four gradients ------------------------------------------------------------------------------------------------


def escape_figures(samples: list[Recorded]) -> Iterator[Figure]:
    """Apply the code of each sample to each sample. Exponents are coded unchanged."""
    counts = [exponents_of(each.grad) for each in samples]
    for source, of in enumerate(counts, start=1):
        code = PrefixCode.of(of)
        for target, on in enumerate(counts, start=1):
            size = on.sum()
            where = {"metric": "escape", "unit": "bits", "case": f"code of S{source} on S{target}"}
            yield {**where, "method": "Huffman", "value": native_bits(of, on) / size}
            yield {**where, "method": "with escape", "value": coded_bits(code, on) / size}


def figures_of(training: Training, steps: int) -> Iterator[Figure]:
    """All figures of one training."""
    samples: list[Recorded] = []
    for optimizer in CHOSEN:
        codes: Codes | None = None
        for step, loss, found in recorded(training, optimizer, steps):
            codes = codes or Codes(found)
            if step % EVERY == 0:
                for figure in step_figures(step, loss, found, codes):
                    yield {**figure, "workload": training.name, "optimizer": optimizer, "step": step}
            codes.after(step, found)
            if optimizer == "AdamW" and step in (0, steps):
                ordered = sorted(found, key=lambda each: float(each.grad.abs().mean()))
                for half in (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]):
                    samples.append(max(half, key=lambda each: each.grad.numel()))
    fixed = {"workload": training.name, "optimizer": "AdamW"}
    yield from ({**fixed, **figure} for figure in escape_figures(samples))
    for each in samples:
        if each.grad.numel() < LEAST_DECODED:  # a branch predictor learns a short stream by heart
            continue
        yield from ({**fixed, **figure} for figure in decoding_rates(each.grad.numpy()))


def run(
    cifar10: Cifar10, sst2: Sst2, steps: Annotated[int, typer.Option(help="Training steps.")] = 300
) -> Iterator[Figure]:
    """Run both trainings."""
    for training in trainings(cifar10, sst2, 32):
        for figure in figures_of(training, steps):
            yield {"dtype": "float32", "ranks": RANKS, "source": "measured", **figure}


def table(found: Sequence[Figure]) -> str:
    """Table of means over the last half of the steps, and of figures that have no step."""
    last = max(figure.get("step") or 0 for figure in found)
    groups: dict[tuple[str, ...], list[float]] = {}
    for figure in found:
        if figure.get("step") is None or figure["step"] > last / 2:
            names = (
                figure["workload"],
                figure["optimizer"],
                figure["metric"],
                figure.get("case") or "",
                figure["method"],
            )
            groups.setdefault(names, []).append(figure["value"])
    return "\n".join(
        f"{workload:12}{optimizer:14}{metric:11}{case:20}{method:28}{np.mean(values):10.4g}"
        for (workload, optimizer, metric, case, method), values in groups.items()
    )


def plot(rows: Sequence[Figure], folder: Path) -> None:
    """Figures 9, 12, 13 and 14."""
    gradient_plots.plot(rows, folder)
