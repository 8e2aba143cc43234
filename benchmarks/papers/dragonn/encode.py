"""Encoding time over what is kept, and decoding time over ranks: DRAGONN's figures 5a and 5b on one core.

    python -m benchmarks.papers.dragonn.encode  # 2 minutes: benchmarks/results/sparse-encode.csv
    python -m benchmarks.papers.dragonn.encode --out sparse-report        # and the plot
    python -m benchmarks.papers.dragonn.encode --plot-only --out sparse-report

Figure 5a: a gradient of 256 MB, larger than the cache, is encoded by sparsifiers and by torch's own top-k, at ratios
from 0.0001 to 0.01, with and without a residual. Beside each time stands that of a sweep that moves the same bytes of
memory in the same run: a read of the gradient, or with a residual a read and a write of it. Figure 5b: the payloads of
2 to 64 ranks of a 64 MB tensor at ratio 0.001, decoded one by one and added (dense decoding), and in one call (sparse
decoding).

Source: DRAGONN (Wang et al. 2022), section 5.2, figure 5. Differences: one CPU core in place of a V100; sizes are fixed
and ratios vary, where figure 5a has it the other way round and says the rest in words.
"""
# Shapes: N = elements of the gradient, W = ranks

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.bench.measure import Case, Mixes, measure
from gradwire.bench.records import write_figures
from gradwire.compressors import Compressor, make
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.wire.payload import Payload

METHODS = ("dragonn", "topk", "dgc", "mstopk", "torch.topk")
RATIOS = (0.0001, 0.0003, 0.001, 0.003, 0.01)
RANKS = (2, 4, 8, 16, 32, 64)
DECODED = ("dragonn", "topk")
DECODED_MB, DECODED_RATIO = 64, 0.001
COLOURS = dict(zip(METHODS, ("#17a08a", "#2f6db5", "#b3590f", "#8a4fbf", "#9aa5b1")))
RESULTS = Path("benchmarks/results/sparse-encode.csv")
COLUMNS = ("ratio",)


@dataclass(frozen=True)
class Figure:
    """One call: its milliseconds, and as a fraction of what memory allows."""

    method: str
    metric: str
    ratio: float
    ranks: int
    ms: float
    fraction: float
    size: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Lines of the CSV."""
        where = {"method": self.method, "dtype": "float32", "size": self.size, "ranks": self.ranks, "rate": "none"}
        where |= {"source": "measured", "ratio": self.ratio}
        yield {**where, "metric": self.metric, "value": self.ms, "unit": "ms"}
        yield {**where, "metric": f"{self.metric}_fraction", "value": self.fraction, "unit": "ratio"}


def encode_calls(
    method: str, ratio: float, grad: torch.Tensor, work: np.ndarray
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The calls to time: what it is, the mix of reads and writes that it needs, and the call."""
    if method == "torch.topk":
        yield "encode", "read", lambda: grad.abs().topk(int(ratio * grad.numel()), sorted=False)
        return
    codec = make(method, ratio=ratio)
    ctx = Context("layer.weight", spec=TensorSpec.of(grad))
    yield "encode", "read", lambda: codec.encode(grad, ctx)
    yield "encode with feedback", "copy", lambda: codec.encode_compensated(grad, ctx, work, scale=0.25)


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


def read(path: Path) -> list[Figure]:
    """The figures of a file."""
    fractions: dict[tuple[str, ...], float] = {}
    found = []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        key = row["method"], row["metric"].removesuffix("_fraction"), row["ratio"], row["ranks"]
        if row["metric"].endswith("_fraction"):
            fractions[key] = float(row["value"])
    for row in rows:
        key = row["method"], row["metric"], row["ratio"], row["ranks"]
        if key in fractions:
            size = int(row["size"])
            found.append(Figure(*key[:2], float(key[2]), int(key[3]), float(row["value"]), fractions[key], size))
    return found


def text(figures: Sequence[Figure]) -> str:
    """Tables of both figures."""
    lines = []
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


def plot(figures: Sequence[Figure], path: Path) -> None:
    """Both figures side by side."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for method in dict.fromkeys(each.method for each in figures):
        for metric, style in (("encode", "-"), ("encode with feedback", "--")):
            mine = [each for each in figures if (each.method, each.metric) == (method, metric)]
            if mine:
                left.plot([e.ratio for e in mine], [e.ms for e in mine], style, color=COLOURS[method], marker="o",
                          label=method + metric.removeprefix("encode"))  # fmt: skip
        for metric, style in (("dense decoding", ":"), ("sparse decoding", "-")):
            mine = [each for each in figures if (each.method, each.metric) == (method, metric)]
            if mine:
                right.plot([e.ranks for e in mine], [e.ms for e in mine], style, color=COLOURS[method], marker="o",
                           label=f"{method}, {metric}")  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="kept fraction", ylabel="ms", title="Encoding 256 MB, one core")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms", title="Decoding 64 MB at 0.001, one core")
    for axes in (left, right):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    right.set_xticks(RANKS, [str(count) for count in RANKS])
    right.set_xticks([], minor=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, and read the figures from --csv")
    arguments = parser.parse_args(argv)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
    if not arguments.plot_only:
        torch.set_num_threads(1)
        figures = list(encoding(arguments.size_mb, arguments.repeats, RATIOS, arguments.methods))
        figures += decoding(arguments.repeats, RANKS)
        write_figures("sparse-encode", (row for each in figures for row in each.rows()), arguments.csv, COLUMNS)
    figures = read(arguments.csv)
    print(text(figures))
    if arguments.out:
        plot(figures, arguments.out / "sparse-encode.svg")
        print(f"Plot: {(arguments.out / 'sparse-encode.svg').resolve()}")


if __name__ == "__main__":
    main()
