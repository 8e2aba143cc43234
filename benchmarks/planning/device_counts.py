"""What device code does: kernel launches, torch operations, synchronizations and bytes of each call, counted.

The generated Triton code of a compressor runs on small tensors, on a GPU or in Triton's interpreter, and every call is
counted. Nothing is timed. The counts are those of tensors of up to 2^20 elements: a sum in canonical order takes one
more launch above. Bytes grow with the tensor and are a line through two sizes.

- A *launch* is one Triton kernel. Its bytes are those of all its tensors, counted once per argument, even if the kernel
  reads only a sample of a tensor, or reads and writes it.
- An *operation* is one call of torch that computes. Its bytes are those of its inputs and outputs. Some operations
  (sort, nonzero) launch several kernels on a GPU, and still count once.
- A *view* is a call of torch that only allocates memory or makes a view. It has no bytes.
- A *copy* moves a few bytes from the host to the device.
- A *synchronization* waits for the device, to learn a length or a flag.
"""
# Shapes: N = elements of the tensor

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import torch
import typer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.options import choose
from gradwire import compressors
from gradwire.compressors.base.registry import compressor_of
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.planner.curves import LinearCost

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

SIZES = (1 << 12, 1 << 14)
NUM_MERGED = 4  # payloads per merge in the table
Row = dict[str, Any]

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.lift_fresh, _aten.detach}
_OVERWRITE = {_aten.zero_, _aten.fill_, _aten.copy_}  # their first argument is only written
_SYNCHRONIZE = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select}


@dataclass(frozen=True)
class Counts:
    """One call. The first five are numbers of calls; `nbytes` are bytes of device memory, by elements of the tensor."""

    launches: int
    operations: int
    views: int
    copies: int
    syncs: int
    nbytes: LinearCost


@dataclass(frozen=True)
class DeviceCounts:
    """All calls of a compressor. `merge` is one call for all payloads of a merge."""

    encode: Counts
    encode_with_residual: Counts
    decode: Counts
    merge: Counts


def has_device_code(spec: str) -> bool:
    """Whether a compressor's device code can be counted: it has some, without a preliminary round."""
    codec = compressor_of(spec)
    return isinstance(codec, TracedCompressor) and not codec.needs_stats


@functools.cache
def counts(spec: str, num_merged: int = NUM_MERGED) -> DeviceCounts:
    """Count the calls of a compressor.

    Args:
        spec: The compressor.
        num_merged: Payloads per merge, at least 2.

    Raises:
        OptionError: It has no device code, or a preliminary round.
    """
    codec = compressor_of(spec)
    if not isinstance(codec, TracedCompressor):
        raise OptionError(f"{spec} has no device code. Name one that has: {', '.join(names())}.")
    if codec.needs_stats:
        raise OptionError(f"{spec} has a preliminary round, which is not counted. Name one of {', '.join(names())}.")
    small, large = (_tallies(codec, size, num_merged) for size in SIZES)
    return DeviceCounts(*map(_line, small, large))


def names() -> list[str]:
    """All compressors whose device code can be counted."""
    return [name for name in compressors.names() if has_device_code(name)]


def _line(small: _Tally, large: _Tally) -> Counts:
    slope = max(0.0, (large.nbytes - small.nbytes) / (SIZES[1] - SIZES[0]))
    nbytes = LinearCost(max(0.0, small.nbytes - slope * SIZES[0]), slope)
    return Counts(large.launches, large.operations, large.views, large.copies, large.syncs, nbytes)


def _tallies(codec: TracedCompressor, size: int, num_merged: int) -> list[_Tally]:
    """Count encode, encode with a residual, decode and merge of one tensor."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grad = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-2).to(device)
    old, new, out = torch.zeros_like(grad), torch.empty_like(grad), torch.empty_like(grad)
    ctx = Context("tensor", world_size=num_merged, spec=TensorSpec((size,)))
    code = codec.on_device
    found, body = _counted(codec, lambda: code.encode(grad, ctx))
    assert body is not None, "the gradient is finite"
    return [
        found,
        _counted(codec, lambda: code.encode(grad, ctx, residual_in=old, residual_out=new))[0],
        _counted(codec, lambda: code.decode([body], ctx, out))[0],
        _counted(codec, lambda: code.decode([body] * num_merged, ctx, out))[0],
    ]


def _counted(codec: TracedCompressor, call: Callable[[], Any]) -> tuple[_Tally, Any]:
    tally = _Tally()
    with _launches_of(codec, tally), _Functions(tally), _Operations(tally):
        found = call()
    return tally, found


# -- counting ------------------------------------------------------------------------------------------------


class _Tally:
    """Counts of one call at one size."""

    def __init__(self) -> None:
        self.launches = self.operations = self.views = self.copies = self.syncs = self.nbytes = 0
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: what happens inside is part of a call that is counted already."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


@contextmanager
def _launches_of(codec: TracedCompressor, tally: _Tally) -> Iterator[None]:
    """Context manager: count the launches of generated code, and of the functions that it calls."""
    from gradwire.lang.targets.triton import host

    launch, modules = host.launch, (host, codec.on_device.module)

    def counted(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        if 0 not in grid:
            tally.launches += 1
            tally.nbytes += sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
        with tally.paused():
            launch(kernel, grid, *args)

    for module in modules:
        vars(module)["launch"] = counted
    try:
        yield
    finally:
        for module in modules:
            vars(module)["launch"] = launch


class _Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, tally = func(*args, **(kwargs or {})), self._tally
        if tally.is_paused:
            return result
        packet = func.overloadpacket
        inputs = args[1:] if packet in _OVERWRITE else args
        tally.syncs += packet in _SYNCHRONIZE or _has_mask(packet, args)
        if func.is_view or packet in _ALLOCATIONS:
            tally.views += 1
        elif packet is not _aten._local_scalar_dense:
            tally.operations += 1
            tally.nbytes += sum(each.nbytes for each in _tensors([inputs, list((kwargs or {}).values()), result]))
        return result


class _Functions(TorchFunctionMode):
    """Counts what crosses the bus: on the CPU, where the interpreter runs, torch dispatches nothing for it."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tally = kwargs or {}, self._tally
        to_device = func is torch.Tensor.to and isinstance(args[1], torch.device)
        if func is torch.as_tensor and not isinstance(args[0], torch.Tensor):
            to_device = True
        if tally.is_paused or not (to_device or func is torch.Tensor.tolist):
            return func(*args, **kwargs)
        tally.copies += to_device
        tally.syncs += not to_device
        with tally.paused():
            return func(*args, **kwargs)


def _has_mask(packet: Any, args: Sequence[Any]) -> bool:
    """Whether an index has a mask, whose true elements a GPU counts first."""
    return packet in (_aten.index, _aten.index_put, _aten.index_put_) and any(
        each is not None and each.dtype == torch.bool for each in args[1]
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)] if isinstance(values, (list, tuple)) else []


# -- as a benchmark ------------------------------------------------------------------------------------------


def run(
    methods: Annotated[str, typer.Option(help="Compressors, such as onebit,dgc.")] = "",
) -> Iterator[Row]:
    """All compressors with device code."""
    for name in choose(methods, names()):
        found = counts(name)
        for each in fields(found):
            calls = asdict(getattr(found, each.name))
            line = calls.pop("nbytes")
            yield {"method": name, "call": each.name, **calls, "fixed_bytes": line["fixed"],
                   "bytes_per_element": line["slope"]}  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """One line for each call, as Markdown."""
    head = "| compressor | call | launches | operations | views | copies | syncs | bytes per element |\n" + "|---" * 8
    lines = [
        f"| `{row['method']}` | {row['call'].replace('_', ' ')} | {row['launches']} | {row['operations']} | "
        f"{row['views']} | {row['copies']} | {row['syncs']} | {row['bytes_per_element']:.1f} |"
        for row in rows
    ]
    return "\n".join([head + "|", *lines])
