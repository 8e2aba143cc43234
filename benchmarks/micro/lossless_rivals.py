"""`lossless` and `gcomp` compared with zstd, zlib and ZipNN, on gradients of the text workload, on one thread.

The rivals are installed with `pip install 'gradwire[bench]'`.

One rank trains the text workload. The gradients are those of its matrices at steps 1, 8 and 32, each packed separately,
as float32 and as in a 16-bit model: rounded, and in float16 multiplied by the largest loss scale that all of them
allow, up to 65,536. `gcomp` sends what a rank of four does on a ring: its gradient divided by four, with the parameters
and optimizer state of that step, rounded in the same way, with derived and with sent levels. A rate is bytes of
gradient over wall time, in both directions. Rivals read and write bytes; ours read and write tensors, and are also
timed with threads for their chunks. Every decoded tensor is compared with the original.

Methods are parts of the record: `--methods` measures some, without the packages of the others.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.keys import key_of
from benchmarks.options import choose
from gradwire.bench.extras import need
from gradwire.bench.workloads import make_workload
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec, as_array
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.kernels.cpu.parallel import one_thread

KEY, CHOICES = ("method",), ("methods",)
STEPS = (1, 8, 32)
RANKS = 4
OURS = ("lossless", "lossless:code=fixed", "gcomp", "gcomp:levels=sent")
THREADS = ", threads"
METHODS = (*OURS, *(f"{name}{THREADS}" for name in OURS), "zlib -1", "zstd -1", "zstd -3", "ZipNN")
# How much of an element `gcomp` may cut: of mantissas it keeps 5 bits, or 1; a subnormal float16 it may cut to nothing.
MOST_CUT = {torch.float32: 1 / 32, torch.bfloat16: 1 / 2, torch.float16: 1.0}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "its own": lambda model: make_workload("text").optimizer(model),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


@dataclass(frozen=True)
class Tensor:
    """A gradient, and the optimizer state for gcomp."""

    grad: torch.Tensor
    aux: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """How a tensor is packed and unpacked. `prepare` is not timed."""

    name: str
    prepare: Callable[[Tensor], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]
    nbytes: Callable[[Any], int]
    check: Callable[[Any, Any], None]
    threads: bool = False


@dataclass(frozen=True)
class Figure:
    """One method on the tensors of one step."""

    optimizer: str
    step: int
    dtype: str
    method: str
    ratio: float
    encode: list[float]
    decode: list[float]


def recorded(optimizer: str, steps: tuple[int, ...] = STEPS) -> Iterator[tuple[int, list[Tensor]]]:
    """The gradients of the matrices at each step, with the optimizer's state before it."""
    torch.manual_seed(0)
    workload = make_workload("text")
    model = workload.model()
    made = OPTIMIZERS[optimizer](model)
    matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    state = OptimizerState(made, matrices)
    for step in range(max(steps) + 1):
        batch = workload.batch(0, step, 0, RANKS)
        made.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        if step in steps:
            yield (
                step,
                [
                    Tensor(parameter.grad.clone(), _copied(state(name, ElementRange(0, parameter.numel()))))
                    for name, parameter in matrices
                ],
            )
        made.step()


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The same tensors in a model of type `dtype`."""
    largest = max(float(tensor.grad.abs().max()) for tensor in tensors)
    scale = 2.0 ** min(16, math.floor(math.log2(2**15 / largest))) if dtype == torch.float16 else 1.0
    found = []
    for tensor in tensors:
        state = {key: values.to(dtype) for key, values in tensor.aux.items() if key in ("parameter", "first", "second")}
        aux = {**tensor.aux, **state, "loss_scale": torch.tensor(scale)} if tensor.aux else {}
        found.append(Tensor((tensor.grad * scale).to(dtype), aux))
    return found


def _copied(aux: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in aux.items()}


def ours(name: str) -> Method:
    """A compressor of gradwire. `gcomp` sends the gradient divided by the number of ranks, all others as it is."""
    spec = name.removesuffix(THREADS)
    codec = make(spec)
    scale = 1.0 if codec.exact else 1 / RANKS

    def prepare(tensor: Tensor) -> tuple[torch.Tensor, Context, torch.Tensor]:
        grad, aux = tensor.grad, {} if codec.exact else tensor.aux
        ctx = Context("w", world_size=RANKS, spec=TensorSpec.of(grad), aux=aux)
        return grad, ctx, torch.empty_like(grad)

    def check(prepared: Any, found: torch.Tensor) -> None:
        grad = prepared[0] * scale
        off = (found.double() - grad.double()).abs()
        if (codec.exact and as_array(found).tobytes() != as_array(grad).tobytes()) or (
            off > grad.double().abs() * MOST_CUT[grad.dtype] * 1.001
        ).any():
            raise AssertionError(f"{name} gave another tensor")

    return Method(
        name,
        prepare,
        lambda prepared: codec.encode(prepared[0], prepared[1], scale=scale),
        lambda prepared, payload: codec.decode(payload, prepared[1], out=prepared[2]),
        lambda payload: payload.body.nbytes,
        check,
        threads=name.endswith(THREADS),
    )


def rival(name: str, pack: Callable[[bytes, str], bytes], unpack: Callable[[bytes, str], bytes]) -> Method:
    def prepare(tensor: Tensor) -> tuple[bytes, str]:
        return as_array(tensor.grad).tobytes(), str(tensor.grad.dtype).removeprefix("torch.")

    def check(prepared: Any, found: bytes) -> None:
        if bytes(found) != prepared[0]:
            raise AssertionError(f"{name} gave another tensor")

    return Method(
        name,
        prepare,
        lambda prepared: pack(*prepared),
        lambda prepared, packed: unpack(packed, prepared[1]),
        len,
        check,
    )


def method_of(name: str) -> Method:
    """The method of this name.

    Raises:
        MissingPackageError: It needs a package that is not installed.
    """
    if name.removesuffix(THREADS) in OURS:
        return ours(name)
    if name == "zlib -1":
        return rival(name, lambda data, _: zlib.compress(data, 1), lambda data, _: zlib.decompress(data))
    need("zipnn" if name == "ZipNN" else "zstandard", extra="bench", purpose="a rival of lossless compression")
    if name == "ZipNN":
        import zipnn

        def zip_nn(dtype: str) -> Any:
            return zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)

        return rival(  # it works in place on what it is given
            name,
            lambda data, dtype: zip_nn(dtype).compress(bytearray(data)),
            lambda data, dtype: zip_nn(dtype).decompress(data),
        )
    import zstandard

    level = int(name.removeprefix("zstd -"))
    return rival(
        name,
        lambda data, _: zstandard.ZstdCompressor(level).compress(data),
        lambda data, _: zstandard.ZstdDecompressor().decompress(data),
    )


def measured(method: Method, tensors: list[Tensor], repeats: int) -> tuple[float, list[float], list[float]]:
    """Packed over plain bytes, and the seconds of each pass over all tensors in both directions."""
    with nullcontext() if method.threads else one_thread():
        return _measured(method, tensors, repeats)


def _measured(method: Method, tensors: list[Tensor], repeats: int) -> tuple[float, list[float], list[float]]:
    prepared = [method.prepare(tensor) for tensor in tensors]
    encodes, decodes, packed = [], [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        packed = [method.encode(each) for each in prepared]
        middle = time.perf_counter()
        found = [method.decode(each, data) for each, data in zip(prepared, packed, strict=True)]
        encodes.append(middle - start)
        decodes.append(time.perf_counter() - middle)
    for each, tensor in zip(prepared, found, strict=True):
        method.check(each, tensor)
    plain = sum(tensor.grad.nbytes for tensor in tensors)
    return sum(method.nbytes(data) for data in packed) / plain, encodes[1:], decodes[1:]


def measured_all(methods: Sequence[Method], repeats: int, steps: tuple[int, ...] = STEPS) -> list[Figure]:
    """Measure methods on one thread. The first pass warms up."""
    found: list[Figure] = []
    for optimizer in OPTIMIZERS if methods else ():
        for step, tensors in recorded(optimizer, steps):
            for dtype in MOST_CUT:
                rounded = cast(tensors, dtype)
                plain = sum(tensor.grad.nbytes for tensor in rounded)
                for method in methods:
                    # Nothing but gcomp depends on the optimizer.
                    if "gcomp" not in method.name and optimizer != "its own":
                        continue
                    ratio, encodes, decodes = measured(method, rounded, repeats)
                    rates = [[plain / seconds / 1e9 for seconds in each] for each in (encodes, decodes)]
                    name = str(dtype).removeprefix("torch.")
                    found.append(Figure(optimizer, step, name, method.name, ratio, *rates))
    return found


def figures(found: list[Figure], size: int) -> Iterator[dict[str, Any]]:
    for each in found:
        fixed = {
            "method": each.method, "dtype": each.dtype, "size": size, "ranks": RANKS, "rate": "none",
            "source": "measured", "step": each.step, "optimizer": each.optimizer,
        }  # fmt: skip
        yield {**fixed, "metric": "ratio", "value": each.ratio, "unit": "fraction"}
        for way, rates in (("encode", each.encode), ("decode", each.decode)):
            low, high = (float(np.percentile(rates, q)) for q in (20, 80))
            spread = {"p20": low, "p80": high, "samples": len(rates)}
            yield {**fixed, "metric": way, "value": statistics.median(rates), "unit": "GB/s", **spread}


def run(
    repeats: Annotated[int, typer.Option(help="Timed passes over all tensors.")] = 5,
    methods: Annotated[str, typer.Option(help="Some of the methods, with semicolons in between.")] = "",
    done: Set[tuple[str, ...]] = frozenset(),
) -> Iterator[list[dict[str, Any]]]:
    """Measure each method that the record does not have."""
    size = sum(parameter.numel() for parameter in make_workload("text").model().parameters() if parameter.dim() > 1)
    chosen = [name for name in choose(methods, METHODS, ";") if key_of({"method": name}, KEY) not in done]
    found = list(figures(measured_all([method_of(name) for name in chosen], repeats), size))
    yield from ([row for row in found if row["method"] == name] for name in chosen)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Ratio and rates of each method, one line for each step and element type."""
    lines = [
        f"{'optimizer':10}{'step':>5}  {'elements':9}{'method':28}{'ratio':>8}{'encode GB/s':>13}{'decode GB/s':>13}"
    ]
    for ratio, encode, decode in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        rates = f"{encode['value']:13.2f}{decode['value']:13.2f}"
        where = f"{ratio['optimizer']:10}{ratio['step']:>5}  {ratio['dtype']:9}{ratio['method']:28}"
        lines.append(f"{where}{ratio['value']:8.3f}{rates}")
    return "\n".join(lines)
