"""A compressor whose encoder and decoder are written in the language: the generated code, with the whole contract.

The generated module carries out the fused sweeps; this one gives it arrays, keys and buffers, and checks what comes
from outside.
"""
# Shapes: N = elements of the tensor or range, W = ranks, T = tensors of a batch

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Reduction, Stat
from gradwire.compressors.base import options as checks
from gradwire.compressors.base.array import NONFINITE, expect, scratch
from gradwire.compressors.base.on_device import OnDevice
from gradwire.compressors.base.on_device import key_words as _keys
from gradwire.compressors.base.on_device import remembered as _remembered
from gradwire.core.context import Context
from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels.cpu.elements import addresses, as_input, as_writable
from gradwire.lang import cache
from gradwire.lang.cpu.runtime import SLOTS
from gradwire.lang.emit import statics
from gradwire.lang.interpret import num_bytes
from gradwire.lang.ir import Node
from gradwire.lang.operators.arithmetic import evaluate_static, static_values
from gradwire.wire.payload import Payload

if TYPE_CHECKING:
    from gradwire.compressors.base.decorator import Algorithm


class TracedCompressor(OnDevice):
    """Base of the classes that `compressor` makes; see `Compressor` for the contract."""

    algorithm: ClassVar[Algorithm]

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in self.algorithm.defaults:
                raise UnknownNameError(f"option of {self.name}", name, self.algorithm.defaults)
        self._options = {**self.algorithm.defaults, **options}
        for name, value in self._options.items():
            self._options[name] = checks.like(name, value, self.algorithm.defaults[name])
        self.program = self.algorithm.trace(self._options)
        self.unbiased = self.algorithm.is_unbiased(self._options)
        self.default_feedback = self.algorithm.feedback_of(self._options)
        self.needs_stats, self.votes = bool(self.program.stats), self.algorithm.votes
        self.remembers = any(node.op == "remembered" for node in self.program.encode_nodes())
        self._statics = statics(self.program)
        self._filters = [node for node in self.program.encode_nodes() if node.op in ("filter", "hash")]
        self._uses_step = any(_depends_on_step(node) for node in self._statics)
        self._static_values: dict[tuple[int, int], np.ndarray] = {}

    # -- algebra ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return dict(self._options)

    def contraction(self, spec: TensorSpec) -> float | None:
        """What the algorithm declares, of the size and its options."""
        bound = self.algorithm.contraction
        return None if bound is None else bound(spec.numel, **self._options)

    def variance(self, spec: TensorSpec) -> float | None:
        """What the algorithm declares, where it is unbiased with these options."""
        bound = self.algorithm.variance
        return None if bound is None or not self.unbiased else bound(spec.numel, **self._options)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """The sizes of all fields; lists at their capacity."""
        total = 0
        for each in self.program.fields:
            source = each.node.space.source
            total += num_bytes(each, spec.numel, 0 if source is None else self._capacity(source, spec.numel))
        return total + 4 * (self.program.items is not None)

    def _capacity(self, node: Node, size: int) -> int:
        """The most items that a list of a gradient of so many elements has."""
        if node.op == "sort":
            return self._capacity(_list_of(node), size)
        if node.op == "top":
            return min(self._capacity(_list_of(node), size), _count(node.inputs[1], size))
        if node.op == "sample":
            return min(size, max(1, _count(node.inputs[1], size)))
        return min(size, _count(node.inputs[2], size)) if len(node.inputs) > 2 else size

    # -- preliminary round -----------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """The rank's value of each `over_ranks`."""
        if not self.program.stats:
            return []
        if grad.is_cuda:
            return self._stats_on_device(grad, ctx, scale)
        x, values = as_input(as_array(grad)), np.empty(len(self.program.stats), np.float32)
        static = self._static(x.size, ctx.step, _remembered(ctx))
        if not self.module.measure(
            x, np.float32(scale), None, None, _keys(ctx), ctx.offset, static, self._lists(x.size), values
        ):
            values.fill(np.inf)
        return [
            Stat(values[i : i + 1], node.attrs["function"]) for i, node in enumerate(self.program.stats)
        ]  # fmt: skip

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """One value for each `over_ranks`."""
        return [(1, node.attrs["function"]) for node in self.program.stats]

    def remember(self, payload: Payload, ctx: Context, size: int) -> float:
        """What the algorithm declares, of the body, size, step and its options."""
        if payload.nonfinite or self.algorithm.remember is None:
            return 0.0
        return self.algorithm.remember(payload.body, size, ctx.step, **self._options)

    # -- encode and decode -----------------------------------------------------------------------------------

    def encode_compensated(
        self,
        grad: torch.Tensor,
        ctx: Context,
        work: np.ndarray | None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        stats: Sequence[np.ndarray] = (),
    ) -> Payload:
        """Encode scale · grad + residual; the compensation is part of the first sweep."""
        assert work is not None or residual is None, "a residual without a place for the next one would be lost"
        if grad.is_cuda:
            return self._encode_on_device(grad, ctx, scale, residual, work, stats)
        body = self._run(as_array(grad), ctx, scale, residual, work, stats)
        return NONFINITE if body is None else Payload(body)

    def encode_many(
        self,
        grads: Sequence[torch.Tensor],
        ctxs: Sequence[Context],
        residuals: Sequence[np.ndarray | None] = (),
    ) -> list[Payload]:
        """Encode several tensors of one element type in one call of compiled code."""
        if any(grad.is_cuda for grad in grads):
            return super().encode_many(grads, ctxs, residuals)
        arrays = [as_input(as_array(grad)) for grad in grads]
        rests = [each for each in residuals or () if each is not None]
        if len({each.dtype for each in arrays}) != 1 or len(rests) not in (0, len(grads)) or self.needs_stats:
            return super().encode_many(grads, ctxs, residuals)
        bodies = [np.empty(self.max_encoded_bytes(TensorSpec.of(grad)), np.uint8) for grad in grads]
        lengths = np.empty(len(grads), np.int64)
        self.module.encode_many(
            arrays[0][:0],
            _places(arrays), _sizes(arrays), np.float32(1), _places(rests) if rests else None,
            _places(bodies), _sizes(bodies), np.stack([_keys(ctx) for ctx in ctxs]),
            np.array([ctx.offset for ctx in ctxs], np.int64),
            np.stack([self._static(each.size, ctx.step, _remembered(ctx)) for each, ctx in zip(arrays, ctxs)]),
            self._lists(max(each.size for each in arrays)), lengths,
        )  # fmt: skip
        return [
            NONFINITE if length < 0 else Payload(_fitted(body, int(length))) for body, length in zip(bodies, lengths)
        ]  # fmt: skip

    def _encode(
        self,
        x: np.ndarray,
        ctx: Context,
        *,
        scale: float = 1.0,
        largest: float | None = None,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> np.ndarray | None:
        return self._run(x, ctx, scale, None, residual, stats)

    def _run(
        self, x: np.ndarray, ctx: Context, scale: float, residual: np.ndarray | None, rest: np.ndarray | None,
        stats: Sequence[np.ndarray],
    ) -> np.ndarray | None:  # fmt: skip
        most, is_fixed = self.max_encoded_bytes(TensorSpec((x.size,))), self.program.has_fixed_size
        # A body that is seldom as long as it could be is written to memory that is kept, and copied.
        lists = self._lists(x.size, 0 if is_fixed else most)
        body = np.empty(most, np.uint8) if is_fixed else lists[lists.size - _aligned(most) :][:most]
        length = self.module.encode(
            as_input(x), np.float32(scale), residual, rest, body, self._given(stats), _keys(ctx), ctx.offset,
            self._static(x.size, ctx.step, _remembered(ctx)), lists,
        )  # fmt: skip
        if length < 0:
            return None
        return body[:length] if is_fixed else body[:length].copy()

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        self._expect_size(body, out.size, stats)
        valid = self.module.decode(
            as_writable(body), out, True if accumulate else None, self._given(stats), _keys(ctx), ctx.offset,
            self._static(out.size, ctx.step), scratch(self._room_bytes([body], out.size)),
        )  # fmt: skip
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    def _decode_sum(
        self,
        bodies: Sequence[np.ndarray],
        ctxs: Sequence[Context],
        stats: Sequence[np.ndarray],
        out: np.ndarray,
    ) -> None:
        for body in bodies:
            self._expect_size(body, out.size, stats)
        ctx = ctxs[0] if ctxs else Context("")
        valid = self.module.decode_sum(
            addresses(bodies, np.uint8), _sizes(bodies), out, self._given(stats), _keys(ctx), ctx.offset,
            self._static(out.size, ctx.step), scratch(self._room_bytes(bodies, out.size)),
        )  # fmt: skip
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    # -- helpers ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def module(self) -> ModuleType:
        """The generated code for the CPU."""
        from gradwire.lang.cpu import emit

        return cache.load(f"{self.name}_cpu", emit(self.program))

    def _static(self, size: int, step: int, remembered: float = 0.0) -> np.ndarray:
        """See `static_values`."""
        if remembered:
            return static_values(self._statics, size, step, remembered)
        key = (size, step if self._uses_step else 0)
        if key not in self._static_values:
            if len(self._static_values) > 4096:
                self._static_values.clear()
            self._static_values[key] = static_values(self._statics, size, step)
        return self._static_values[key]

    def _lists(self, size: int, body_bytes: int = 0) -> np.ndarray:
        """Memory for what encoding a gradient of so many elements leaves in between, and for a body behind it."""
        lists_bytes = sum(self._list_bytes(node, size) for node in self._filters)
        return scratch(lists_bytes + _aligned(self._coded_bytes(size)) + _aligned(body_bytes))

    def _list_bytes(self, node: Node, size: int) -> int:
        """What a sweep writes a list to: as many pairs as could be chosen, and for a hash the slot of each."""
        if node.op == "filter":
            return 8 * (self._capacity(node, size) + SLOTS)
        return _aligned(8 * (size + SLOTS) + 4 * size)

    def _coded_bytes(self, size: int) -> int:
        """The packed bytes of the field that is shortened, if there is one."""
        last = self.program.fields[-1]
        return 0 if last.coding is None else last.dtype.num_bytes(size)

    def _room_bytes(self, bodies: Sequence[np.ndarray], size: int) -> int:
        """What decoders expand fields to: packed bytes; or positions and values of as many items as a body can hold."""
        lists = [each for each in self.program.fields if each.node.space == self.program.items]
        if not lists:
            return len(bodies) * self._coded_bytes(size)
        least_bits = sum(1 if each.is_positions else each.dtype.bits for each in lists)
        return sum(8 * min(size, int(8 * body.nbytes / least_bits)) for body in bodies)

    def _given(self, stats: Sequence[np.ndarray]) -> np.ndarray | None:
        """The reduced values of the preliminary round, float32; None where there was none."""
        if not stats:
            return None
        if [entry.shape for entry in stats] != [(1,)] * len(self.program.stats):
            raise ValueError(
                f"Expected {len(self.program.stats)} entries of stats with one value each, got shapes "
                f"{[entry.shape for entry in stats]}. Do: pass what `stats` gave, reduced over ranks."
            )
        return np.concatenate(stats).astype(np.float32)

    def _expect_size(self, body: np.ndarray, size: int, stats: Sequence[np.ndarray]) -> None:
        most = self.max_encoded_bytes(TensorSpec((size,)))
        least = most - 4 * len(self.program.stats) * bool(stats)
        if self.program.has_fixed_size:
            expect(body.nbytes == least, f"{least} bytes", body.nbytes, self.name)
        else:
            expect(body.nbytes <= most, f"at most {most} bytes", body.nbytes, self.name)


def _list_of(node: Node) -> Node:
    source = node.inputs[0].space.source
    return source if source is not None else node.inputs[0]


def _count(node: Node, size: int) -> int:
    """The most that a count comes to; one that changes from step to step has no bound but the size."""
    return size if _depends_on_step(node) else max(0, int(evaluate_static(node, size)))


def _depends_on_step(node: Node) -> bool:
    return node.op == "step" or any(map(_depends_on_step, node.inputs))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _fitted(body: np.ndarray, length: int) -> np.ndarray:
    """The part that was written, in memory of its own where much was not."""
    return body[:length] if 2 * length >= body.size else body[:length].copy()


def _places(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([each.__array_interface__["data"][0] for each in arrays], np.uint64)


def _sizes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([each.size for each in arrays], np.int64)
