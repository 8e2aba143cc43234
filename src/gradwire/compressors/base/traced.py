"""Base class of compressors that are written in the language: generated code behind the contract.

The generated module runs the fused sweeps. This one passes arrays, keys and buffers to it, and checks its input.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import options as checks
from gradwire.compressors.base.array import NONFINITE, EncodeArguments, expect, scratch
from gradwire.compressors.base.contract import Compiled, Reduction, Stat, StatefulCompressor, StateSource
from gradwire.compressors.base.definition import Definition
from gradwire.compressors.base.on_device import OnDevice
from gradwire.compressors.base.on_device import previous_state as _previous_state
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.context import key_words as _keys
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels.cpu.elements import addresses, as_input, as_writable
from gradwire.lang import cache
from gradwire.lang.emit import statics
from gradwire.lang.interpret import is_stat, num_bytes
from gradwire.lang.ir import Node, closure
from gradwire.lang.operators.arithmetic import evaluate_static, static_values
from gradwire.lang.targets.numba.runtime import SLOTS
from gradwire.wire.payload import Payload

_ANY_SPEC = TensorSpec((1,))
_DRAWING = ("random", "sample", "hash")  # operators that use the keys
_MOST_ELEMENTS = (1 << 32) - 1  # whose positions, and their number, are uint32


class TracedCompressor(OnDevice):
    """Base class of what `compressor` makes; see `Compressor` for the contract."""

    definition: ClassVar[Definition]

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in self.definition.defaults:
                raise UnknownNameError(f"option of {self.name}", name, self.definition.defaults)
        self._options = {**self.definition.defaults, **options}
        for name, value in self._options.items():
            self._options[name] = checks.like(name, value, self.definition.defaults[name])
        self.program = self.definition.trace(self._options)
        self.unbiased = self.definition.is_unbiased(self._options)
        self.default_feedback = self.definition.feedback_of(self._options)
        self.encode_own_before_merge = self.definition.declared.encode_own_before_merge
        self.sparse = self.program.items is not None
        self._uses_state = any(node.op == "previous_state" for node in self.program.encode_nodes())
        self._statics = statics(self.program)
        self._filters = [node for node in self.program.encode_nodes() if node.op in ("filter", "hash")]
        self.loses_selected = any(node.op == "hash" for node in self._filters)
        self._uses_step = any(_depends_on(node, "step") for node in self._statics)
        self._static_values: dict[tuple[int, int], np.ndarray] = {}

    # -- algebra ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return dict(self._options)

    def contraction(self, spec: TensorSpec) -> float | None:
        """Declared contraction for this size and these options."""
        bound = self.definition.declared.contraction
        return None if bound is None else bound(spec.numel, **self._options)

    def variance(self, spec: TensorSpec) -> float | None:
        """Declared variance for this size and these options, if they make it unbiased."""
        bound = self.definition.declared.variance
        return None if bound is None or not self.unbiased else bound(spec.numel, **self._options)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Sizes of all fields, with lists at their capacity."""
        total = 0
        for each in self.program.fields:
            source = each.node.space.source
            total += num_bytes(each, spec.numel, 0 if source is None else self._capacity(source, spec.numel))
        return total + 4 * (self.program.items is not None)

    def _capacity(self, node: Node, size: int) -> int:
        """Largest number of items in a list of a gradient of this size."""
        if node.op == "sort":
            return self._capacity(_list_of(node), size)
        if node.op == "top":
            return min(self._capacity(_list_of(node), size), _count(node.inputs[1], size))
        if node.op == "sample":
            return min(size, max(1, _count(node.inputs[1], size)))
        return min(size, _count(node.inputs[2], size)) if len(node.inputs) > 2 else size

    # -- preliminary round -----------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """Value of each `over_ranks` on this rank."""
        if not self.program.stats:
            return []
        if grad.is_cuda:
            return self._stats_on_device(grad, ctx, scale)
        x, values = as_input(as_array(grad)), np.empty(len(self.program.stats), np.float32)
        static = self._static(x.size, ctx.step, _previous_state(ctx))
        if not self.module.measure(
            x, np.float32(scale), None, None, _keys(ctx), ctx.offset, static, self._lists(x.size), values
        ):
            values.fill(np.inf)
        return self._as_stats(values)

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """One value for each `over_ranks`."""
        return [(1, node.attrs["function"]) for node in self.program.stats]

    # -- encode and decode -----------------------------------------------------------------------------------

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        *,
        scale: float = 1.0,
        residual_in: np.ndarray | None = None,
        residual_out: np.ndarray | None = None,
    ) -> Payload:
        """Encode scale · grad + residual_in. The first sweep adds them; a gradient on a GPU is encoded there."""
        assert residual_out is not None or residual_in is None, "without residual_out, the error would be lost"
        self._expect_positions(grad.numel())
        if grad.is_cuda:
            return self._encode_on_device(grad, ctx, stats, scale, residual_in, residual_out)
        args = EncodeArguments(stats, scale, residual_in=residual_in, residual_out=residual_out)
        body = self._encode(as_array(grad), ctx, args)
        return NONFINITE if body is None else Payload(body)

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        most, is_fixed = self.max_encoded_bytes(TensorSpec((x.size,))), self.program.has_fixed_size
        # A body that is usually shorter than its bound is written to scratch memory, and copied.
        lists = self._lists(x.size, 0 if is_fixed else most)
        body = buffers.empty(most) if is_fixed else lists[lists.size - _aligned(most) :][:most]
        length = self.module.encode(
            as_input(x), np.float32(args.scale), args.residual_in, args.residual_out, body, self._given(args.stats),
            _keys(ctx), ctx.offset, self._static(x.size, ctx.step, _previous_state(ctx)), lists,
        )  # fmt: skip
        if length < 0:
            return None
        if is_fixed:
            return body[:length]
        kept = buffers.empty(length)
        kept[:] = body[:length]
        return kept

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        self._expect_size(body, out.size, stats)
        valid = self.module.decode(
            as_writable(body), out, True if accumulate else None, self._given(stats), _keys(ctx), ctx.offset,
            self._static(out.size, ctx.step), scratch(self._expanded_bytes([body], out.size)),
        )  # fmt: skip
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        for body in bodies:
            self._expect_size(body, out.size, stats)
        ctx = ctxs[0] if ctxs else Context("")
        valid = self.module.decode_sum(
            addresses(bodies, np.uint8), _sizes(bodies), out, self._given(stats), _keys(ctx), ctx.offset,
            self._static(out.size, ctx.step), scratch(self._expanded_bytes(bodies, out.size)),
        )  # fmt: skip
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    def compiled(self) -> Compiled | None:
        """The functions of the generated module."""
        return self._compiled

    # -- helpers ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def _compiled(self) -> Compiled | None:
        if self.program.stats or self._uses_state:
            return None
        draws = any(node.op in _DRAWING for node in (*self.program.encode_nodes(), *self._filters))
        return Compiled(
            *(self.module.encode, self.module.decode_sum, self._static, self._scratch_bytes, self._uses_step, draws)
        )

    def _scratch_bytes(self, size: int, num_payloads: int) -> int:
        most = np.empty(self.max_encoded_bytes(TensorSpec((size,))), np.uint8)
        return max(self._lists_bytes(size), self._expanded_bytes([most] * num_payloads, size))

    @functools.cached_property
    def module(self) -> ModuleType:
        """Generated code for the CPU."""
        from gradwire.lang.targets.numba import emit

        return cache.load(f"{self.name}_cpu", emit(self.program))

    def _static(self, size: int, step: int, previous_state: float = 0.0) -> np.ndarray:
        """See `static_values`."""
        if previous_state:
            return static_values(self._statics, size, step, previous_state)
        key = (size, step if self._uses_step else 0)
        found = self._static_values.get(key)  # read once, as other threads may clear the cache
        if found is None:
            found = static_values(self._statics, size, step)
            if len(self._static_values) > 4096:
                self._static_values.clear()
            self._static_values[key] = found
        return found

    def _lists(self, size: int, body_bytes: int = 0) -> np.ndarray:
        """Memory for intermediate lists of an encode, and for a body after them."""
        return scratch(self._lists_bytes(size) + _aligned(body_bytes))

    def _lists_bytes(self, size: int) -> int:
        return sum(self._list_bytes(node, size) for node in self._filters) + _aligned(self._coded_bytes(size))

    def _list_bytes(self, node: Node, size: int) -> int:
        """Bytes of a list: all pairs that could be chosen, and for a hash the slot of each."""
        if node.op == "filter":
            return 8 * (self._capacity(node, size) + SLOTS)
        return _aligned(8 * (size + SLOTS) + 4 * size)

    def _coded_bytes(self, size: int) -> int:
        """Packed bytes of the field that is shortened, if there is one."""
        last = self.program.fields[-1]
        return 0 if last.coding is None else last.dtype.num_bytes(size)

    def _expanded_bytes(self, bodies: Sequence[np.ndarray], size: int) -> int:
        """Bytes that decoders expand fields to: packed bytes, or positions and values of all items of a body."""
        lists = [each for each in self.program.fields if each.node.space == self.program.items]
        if not lists:
            return len(bodies) * self._coded_bytes(size)
        least_bits = sum(1 if each.is_positions else each.dtype.bits for each in lists)
        return sum(8 * min(size, int(8 * body.nbytes / least_bits)) for body in bodies)

    def _given(self, stats: Sequence[np.ndarray]) -> np.ndarray | None:
        """Reduced values of the preliminary round, float32; None without one."""
        return np.concatenate(self._check_stats(stats, _ANY_SPEC)).astype(np.float32) if stats else None

    def _expect_positions(self, size: int) -> None:
        """Raise `ValueError` if the positions of a tensor of this size do not fit 32 bits."""
        if self.sparse and size > _MOST_ELEMENTS:
            raise ValueError(
                f"{self.name} sends positions of 32 bits, but the tensor has {size} elements. Partition it into parts "
                f"of at most {_MOST_ELEMENTS} elements."
            )

    def _expect_size(self, body: np.ndarray, size: int, stats: Sequence[np.ndarray]) -> None:
        self._expect_positions(size)
        most = self.max_encoded_bytes(TensorSpec((size,)))
        shared = sum(is_stat(self.program, each) for each in self.program.fields) if stats else 0
        least = most - 4 * shared
        if self.program.has_fixed_size:
            expect(body.nbytes == least, f"{least} bytes", body.nbytes, self.name)
        else:
            expect(body.nbytes <= most, f"at most {most} bytes", body.nbytes, self.name)


def _list_of(node: Node) -> Node:
    source = node.inputs[0].space.source
    return source if source is not None else node.inputs[0]


def _count(node: Node, size: int) -> int:
    """Largest value of a count; a count that changes from step to step is only bounded by the size."""
    return size if _depends_on(node, "step", "previous_state") else max(0, int(evaluate_static(node, size)))


def _depends_on(node: Node, *ops: str) -> bool:
    return any(each.op in ops for each in closure([node]))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _sizes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([each.size for each in arrays], np.int64)


class StatefulTracedCompressor(TracedCompressor, StatefulCompressor):
    """A `TracedCompressor` with a `next_state` function; `previous_state()` is the value that it returned."""

    state_source: ClassVar[StateSource] = "payload"

    def next_state(self, source: Payload, ctx: Context) -> np.ndarray | None:
        """What the algorithm declares, float32[1]; None if it keeps the present state or this instance has none.

        Raises:
            OptionError: The algorithm's function did not return one finite number.
        """
        function = self.definition.declared.next_state
        if source.nonfinite or function is None or ctx.spec is None or not self._uses_state:
            return None
        found = function(source.body, ctx.spec.numel, ctx.step, **self._options)
        if found is None:
            return None
        try:
            with np.errstate(over="ignore"):  # refused below
                state = np.asarray(found, np.float32).flatten()
        except (TypeError, ValueError):
            state = np.empty(0, np.float32)
        if state.size != 1 or not np.isfinite(state[0]):
            raise OptionError(f"next_state of {self.name!r} must return one finite number, as float32, not {found!r}.")
        return state
