"""Encoding time by ratio, and decoding time by number of ranks: DRAGONN's figures 5a and 5b on one core.

Figure 5a: sparsifiers and torch's own top-k encode a gradient of 256 MB, larger than the cache, at ratios from 0.0001
to 0.01, with and without a residual. Each time is compared with that of a sweep that moves the same bytes in the same
run: a read of the gradient, or, with a residual, a read and a write of it. Figure 5b: the payloads of 2 to 64 ranks of
a 64 MB tensor at ratio 0.001 are decoded one by one and added (dense decoding), or in one call (sparse decoding).

Source: DRAGONN (Wang et al. 2022), section 5.2, figure 5. Differences: one CPU core instead of a V100; sizes are fixed
and ratios vary, while figure 5a varies sizes and the text states the rest.
"""
# Shapes: N = elements of the gradient, W = ranks

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.options import choose
from benchmarks.plotting import figure, plain_numbers
from gradwire.bench.measure import Case, Mixes, measure
from gradwire.compressors import Compressor, make
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.wire.payload import Payload

METHODS = ("dragonn", "topk", "dgc", "mstopk", "torch.topk")
RATIOS = (0.0001, 0.0003, 0.001, 0.003, 0.01)
RANKS = (2, 4, 8, 16, 32, 64)
DECODED = ("dragonn", "topk")
DECODED_MB, DECODED_RATIO = 64, 0.001
COLORS = dict(zip(METHODS, ("#17a08a", "#2f6db5", "#b3590f", "#8a4fbf", "#9aa5b1")))
Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One timed call: milliseconds, and speed as a fraction of what memory allows."""

    method: str
    metric: str
    ratio: float
    ranks: int
    ms: float
    fraction: float
    size: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the CSV."""
        where = {"method": self.method, "dtype": "float32", "size": self.size, "ranks": self.ranks, "rate": "none"}
        where |= {"source": "measured", "ratio": self.ratio}
        yield {**where, "metric": self.metric, "value": self.ms, "unit": "ms"}
        yield {**where, "metric": f"{self.metric}_fraction", "value": self.fraction, "unit": "ratio"}


def encode_calls(
    method: str, ratio: float, grad: torch.Tensor, work: np.ndarray
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield the calls to time: label, mix of reads and writes, and the call."""
    if method == "torch.topk":
        yield "encode", "read", lambda: grad.abs().topk(int(ratio * grad.numel()), sorted=False)
        return
    codec = make(method, ratio=ratio)
    ctx = Context("layer.weight", spec=TensorSpec.of(grad))
    yield "encode", "read", lambda: codec.encode(grad, ctx)
    yield "encode with feedback", "copy", lambda: codec.encode(grad, ctx, scale=0.25, residual_out=work)


def encoding(size_mb: int, repeats: int, ratios: Sequence[float], methods: Sequence[str]) -> Iterator[Figure]:
    """Figure 5a."""
    length = size_mb * 1_000_000 // 4
    x, work = np.random.default_rng(0).standard_normal(length, np.float32), np.zeros(length, np.float32)
    grad, mixes = torch.from_numpy(x), Mixes(x)
    for ratio in ratios:
        for method in methods:
            for metric, mix, call in encode_calls(method, ratio, grad, work):
                times = 3 if method == "torch.topk" else repeats
                moved = mixes.calls[mix][0]
                row = measure(Case(method, "float32", moved, mix, call), mixes, x, times)
                ms = moved * length / row.median / 1e6
                yield Figure(method, metric, ratio, 1, ms, row.fraction_of_mix, row.size)


def decode_calls(
    codec: Compressor, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, dense: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Both ways to sum the payloads of all ranks."""

    def one_by_one() -> None:
        out.zero_()
        for payload, ctx in zip(payloads, ctxs):
            out.add_(codec.decode(payload, ctx, out=dense))

    yield "dense decoding", one_by_one
    yield "sparse decoding", lambda: codec.decode_sum(payloads, ctxs, out)


def decoding(repeats: int, ranks: Sequence[int]) -> Iterator[Figure]:
    """Figure 5b."""
    length = DECODED_MB * 1_000_000 // 4
    rng = np.random.default_rng(0)
    out, dense = torch.zeros(length), torch.zeros(length)
    x = dense.numpy()
    mixes = Mixes(x)
    for method in DECODED:
        codec = make(method, ratio=DECODED_RATIO)
        ctxs = [Context("layer.weight", rank=rank, spec=TensorSpec((length,))) for rank in range(max(ranks))]
        payloads = [codec.encode(torch.from_numpy(rng.standard_normal(length, np.float32)), ctx) for ctx in ctxs]
        for count in ranks:
            for metric, call in decode_calls(codec, payloads[:count], ctxs[:count], out, dense):
                row = measure(Case(method, "float32", 4, "write", call), mixes, x, repeats)
                ms = 4 * length / row.median / 1e6
                yield Figure(method, metric, DECODED_RATIO, count, ms, row.fraction_of_mix, row.size)


def read(rows: Sequence[Row]) -> list[Figure]:
    """Read the figures from rows of the CSV."""
    key = lambda row: (row["method"], row["metric"].removesuffix("_fraction"), row["ratio"], row["ranks"])  # noqa: E731
    fractions = {key(row): row["value"] for row in rows if row["metric"].endswith("_fraction")}
    return [
        Figure(*key(row), row["value"], fractions[key(row)], row["size"])
        for row in rows
        if not row["metric"].endswith("_fraction")
    ]


def table(rows: Sequence[Row]) -> str:
    """Tables of both figures."""
    lines, figures = [], read(rows)
    for metric in dict.fromkeys(each.metric for each in figures):
        mine = [each for each in figures if each.metric == metric]
        across = "ratio" if "encode" in metric else "ranks"
        columns = sorted({getattr(each, across) for each in mine})
        lines.append(f"{metric}, ms (fraction of what memory allows), by {across}")
        lines.append(f"{'':12}" + "".join(f"{column:>16g}" for column in columns))
        for method in dict.fromkeys(each.method for each in mine):
            cells = {
                getattr(each, across): f"{each.ms:.1f} ({each.fraction:.2f})" for each in mine if each.method == method
            }
            lines.append(f"{method:12}" + "".join(f"{cells.get(column, ''):>16}" for column in columns))
        lines.append("")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Both figures next to each other."""
    figures = read(rows)
    kinds = ((("encode", "-"), ("encode with feedback", "--")), (("dense decoding", ":"), ("sparse decoding", "-")))
    with figure(folder / "sparse-encode.svg", columns=2, size=(12, 4.6)) as axes:
        for axis, across, metrics in zip(axes[0], ("ratio", "ranks"), kinds):
            for method in dict.fromkeys(each.method for each in figures):
                for metric, style in metrics:
                    mine = [each for each in figures if (each.method, each.metric) == (method, metric)]
                    if mine:
                        xs, label = (
                            [getattr(each, across) for each in mine],
                            f"{method} {metric.removeprefix('encode ')}",
                        )
                        label = label.removesuffix(" encode")
                        axis.plot(xs, [e.ms for e in mine], style, color=COLORS[method], marker="o", label=label)
            axis.set(xscale="log", yscale="log", ylabel="ms")
            plain_numbers(axis.yaxis)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        left, right = axes[0]
        left.set(xlabel="kept fraction", title="Encoding 256 MB, one core")
        right.set(xlabel="ranks", title="Decoding 64 MB at 0.001, one core")
        right.set_xticks(RANKS, [str(count) for count in RANKS])
        right.set_xticks([], minor=True)


def run(
    size_mb: Annotated[int, typer.Option(help="Size of the gradient in MB.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed runs of each call.")] = 7,
    methods: Annotated[str, typer.Option(help="Sparsifiers, such as dragonn,topk.")] = "",
) -> Iterator[Row]:
    """Measure both figures."""
    for each in (*encoding(size_mb, repeats, RATIOS, choose(methods, METHODS)), *decoding(repeats, RANKS)):
        yield from each.rows()
