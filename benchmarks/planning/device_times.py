"""Times of device code on a GPU, against a copy of the same tensor and against the sum of its counted parts.

First the parts: a launch, an operation of torch, a view, a small copy, a synchronization, and the rates of memory and
bus. Then encode (with a residual, if the compressor has one), decode and merge of every compressor with device code.
Each call is timed with what it waits for, until the device is idle. It needs a GPU with Triton.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.options import choose
from benchmarks.planning.device_counts import NUM_MERGED, Counts, counts, names
from gradwire.compressors.base.registry import compressor_of
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec

SIZES = (1 << 14, 1 << 20, 1 << 24)  # elements
BULK = 1 << 28  # bytes
MANY = 1000  # calls that are timed together
PARTS = ("launch", "operation", "view", "copy", "synchronization")
RATES = ("memory", "pageable to device", "device to pageable", "pinned to device", "device to pinned")
KEY, CHOICES = ("method",), ("methods",)
Row = dict[str, Any]


def run(
    methods: Annotated[str, typer.Option(help="Compressors, such as onebit,dgc.")] = "",
    seconds: Annotated[float, typer.Option(help="About how long each call is timed.")] = 0.2,
) -> Iterator[Row]:
    """Parts, then compressors."""
    fixed = {"device": torch.cuda.get_device_name(), "dtype": "float32", "ranks": 1, "rate": "none"}
    parts, chosen = {**_parts(), **_rates(seconds)}, choose(methods, names())
    yield from ({**fixed, **row} for row in part_rows(parts, chosen))
    for method in chosen:
        for size in SIZES:
            for row in _codec(method, size, parts, seconds):
                yield {**fixed, "method": method, "size": size, "unit": "s", **row}


def part_rows(parts: dict[str, float], chosen: Sequence[str]) -> Iterator[Row]:
    """Rows of the parts; none in a run of some compressors, since those of the record belong to the others' times."""
    if set(chosen) == set(names()):
        for name, value in parts.items():
            unit = "B/s" if name in RATES else "s"
            yield {"method": "gpu", "metric": name, "value": value, "unit": unit, "source": "measured"}


def _parts() -> dict[str, float]:
    """Seconds of each part, on the host: what it issues is done later."""
    from benchmarks.planning.nothing import nothing
    from gradwire.lang.targets.triton.host import launch

    x, few = torch.zeros(1024, device="cuda"), np.zeros(4, np.float32)
    return {
        "launch": _many(lambda: launch(nothing, (1,), x, 1024)),
        "operation": _many(lambda: x.add_(1)),
        "view": _many(lambda: x.view(32, 32)),
        "copy": _many(lambda: torch.as_tensor(few).to(x.device)),
        "synchronization": _many(lambda: x[:1].tolist()),
    }


def _many(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(MANY):
            call()
        found.append((time.perf_counter() - begun) / MANY)
    return statistics.median(found)


def _rates(seconds: float) -> dict[str, float]:
    """Bytes a second of large copies. Memory counts bytes read and bytes written."""
    there = torch.empty(BULK, dtype=torch.uint8, device="cuda")
    other, plain = torch.empty_like(there), torch.zeros(BULK, dtype=torch.uint8)
    pinned = plain.pin_memory()
    pairs = ((other, there), (there, plain), (plain, there), (there, pinned), (pinned, there))
    found = {name: BULK / _timed(partial(into.copy_, of), seconds)[0] for name, (into, of) in zip(RATES, pairs)}
    return {**found, "memory": 2 * found["memory"]}


def _timed(call: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of a call and of what it issues, in seconds."""
    found, end = [], time.perf_counter() + seconds
    call()
    while len(found) < 5 or time.perf_counter() < end:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    low, middle, high = np.percentile(found, [20, 50, 80])
    return float(middle), float(low), float(high)


def _codec(method: str, size: int, parts: dict[str, float], seconds: float) -> Iterator[Row]:
    codec, number = compressor_of(method), counts(method)
    assert isinstance(codec, TracedCompressor)
    code, ctx = codec.on_device, Context("tensor", world_size=NUM_MERGED, spec=TensorSpec((size,)))
    grad = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-2).cuda()
    old, new, out = torch.zeros_like(grad), torch.empty_like(grad), torch.empty_like(grad)
    kept = {} if codec.exact or codec.default_feedback == "none" else {"residual_in": old, "residual_out": new}
    body = code.encode(grad, ctx, **kept)
    assert body is not None, "the gradient is finite"
    calls = {
        "encode": (lambda: code.encode(grad, ctx, **kept), number.encode_with_residual if kept else number.encode),
        "decode": (lambda: code.decode([body], ctx, out), number.decode),
        "merge": (lambda: code.decode([body] * NUM_MERGED, ctx, out), number.merge),
        "clone": (lambda: out.copy_(grad), None),
    }
    for metric, (call, counted) in calls.items():
        middle, low, high = _timed(call, seconds)
        yield {"metric": metric, "value": middle, "p20": low, "p80": high, "source": "measured"}
        if counted:
            yield {"metric": metric, "value": _predicted(counted, size, parts), "source": "predicted"}


def _predicted(counted: Counts, size: int, parts: dict[str, float]) -> float:
    numbers = (counted.launches, counted.operations, counted.views, counted.copies, counted.syncs)
    calls = sum(number * parts[name] for number, name in zip(numbers, PARTS, strict=True))
    return calls + counted.nbytes(size) / parts["memory"]


# -- table -------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The parts, and milliseconds of each call with those of its parts in brackets."""
    parts = {row["metric"]: row["value"] for row in rows if row["method"] == "gpu"}
    said = [f"{name} {1e6 * parts[name]:.1f} us" for name in PARTS if name in parts]
    said += [f"{name} {parts[name] / 1e9:.0f} GB/s" for name in RATES if name in parts]
    found = {(row["method"], row["size"], row["metric"], row["source"]): row["value"] for row in rows if row["size"]}
    sizes = sorted({size for _, size, *_ in found})
    head = ["| compressor | elements | encode, ms | decode | merge of 4 | copy |", "|---|---|---|---|---|---|"]
    lines = []
    for method in dict.fromkeys(method for method, *_ in found):
        for size in sizes:
            cells = [
                f"{1e3 * found[method, size, call, 'measured']:.3f} "
                f"({1e3 * found[method, size, call, 'predicted']:.3f})"
                for call in ("encode", "decode", "merge")
            ]
            copy = 1e3 * found[method, size, "clone", "measured"]
            lines.append(f"| `{method}` | {size:,} | {' | '.join(cells)} | {copy:.3f} |")
    return "\n".join([", ".join(said) + ".", "", *head, *lines])
