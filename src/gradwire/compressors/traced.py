"""Compressors written in the language: from two functions to a registered class with the whole contract.

    @compressor(feedback="none", unbiased=True)
    def minmax(g, bits: int = 2): ...

    @minmax.decode
    def _(p): ...

    codec = minmax(bits=4)          # or gradwire.make("minmax", bits=4), or the name in gradwire.attach

The generated module carries out the fused sweeps; this one gives it arrays, keys and buffers, and checks what comes
from outside.

Source: HiPress (Bai et al. 2021), section 4.3: an algorithm in the language needs no line of integration.
"""
# Shapes: N = elements of the tensor or range, W = ranks, T = tensors of a batch

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, overload

import numpy as np
import torch

from gradwire.compressors import options as checks
from gradwire.compressors.array import NONFINITE, expect, scratch
from gradwire.compressors.base import FeedbackName, Reduction, Stat, as_array
from gradwire.compressors.on_device import OnDevice
from gradwire.compressors.on_device import key_words as _keys
from gradwire.compressors.registry import register
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.kernels.cpu.elements import addresses, as_input, as_writable
from gradwire.lang import cache
from gradwire.lang.cpu.runtime import SLOTS
from gradwire.lang.emit import statics
from gradwire.lang.errors import TraceError
from gradwire.lang.interpret import num_values
from gradwire.lang.ir import Node, Program
from gradwire.lang.operators.arithmetic import evaluate_static, static_values
from gradwire.lang.trace import signature_line, trace
from gradwire.wire.payload import Payload

Bound = Callable[..., float | None]
Feedback = FeedbackName | Callable[..., FeedbackName]


class TracedCompressor(OnDevice):
    """Base of the classes that `compressor` makes; see `Compressor` for the contract."""

    algorithm: ClassVar[Algorithm]

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in self.algorithm.defaults:
                raise UnknownNameError(f"option of {self.name}", name, self.algorithm.defaults)
        self._options = {**self.algorithm.defaults, **options}
        for name, value in self._options.items():
            self._options[name] = _checked(name, value, self.algorithm.defaults[name])
        self.program = self.algorithm.trace(self._options)
        unbiased, feedback = self.algorithm.unbiased, self.algorithm.feedback
        self.unbiased = unbiased(**self._options) if callable(unbiased) else unbiased
        self.default_feedback = feedback(**self._options) if callable(feedback) else feedback
        self.needs_stats, self.votes = bool(self.program.stats), self.algorithm.votes
        self._statics = statics(self.program)
        self._filters = [node for node in self.program.encode_nodes() if node.op == "filter"]
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
            if each.node.space.kind == "items":
                assert each.node.space.source is not None
                count = self._capacity(each.node.space.source, spec.numel)
            else:
                count = num_values(self.program, each, spec.numel, 0, False)
            total += each.dtype.num_bytes(count)
        return total

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
        static = self._static(x.size, ctx.step)
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
            np.stack([self._static(each.size, ctx.step) for each, ctx in zip(arrays, ctxs)]),
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
            self._static(x.size, ctx.step), lists,
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
            self._static(out.size, ctx.step), scratch(self._coded_bytes(out.size)),
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
            self._static(out.size, ctx.step), scratch(len(bodies) * self._coded_bytes(out.size)),
        )  # fmt: skip
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    # -- helpers ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def module(self) -> ModuleType:
        """The generated code for the CPU."""
        from gradwire.lang.cpu import emit

        return cache.load(f"{self.name}_cpu", emit(self.program))

    def _static(self, size: int, step: int) -> np.ndarray:
        """See `static_values`."""
        key = (size, step if self._uses_step else 0)
        if key not in self._static_values:
            if len(self._static_values) > 4096:
                self._static_values.clear()
            self._static_values[key] = static_values(self._statics, size, step)
        return self._static_values[key]

    def _lists(self, size: int, body_bytes: int = 0) -> np.ndarray:
        """Memory for what encoding a gradient of so many elements leaves in between, and for a body behind it."""
        lists_bytes = sum(8 * (self._capacity(node, size) + SLOTS) for node in self._filters)
        return scratch(lists_bytes + _aligned(self._coded_bytes(size)) + _aligned(body_bytes))

    def _coded_bytes(self, size: int) -> int:
        """The packed bytes of the field that is shortened, if there is one."""
        last = self.program.fields[-1]
        return 0 if last.coding is None else last.dtype.num_bytes(size)

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


class Algorithm:
    """What `compressor` makes of a function: call it with options for a compressor of the whole contract."""

    def __init__(
        self, encode: Callable[..., Any], name: str, feedback: Feedback, unbiased: bool | Callable[..., bool],
        contraction: Bound | None, variance: Bound | None, votes: bool,
    ) -> None:  # fmt: skip
        self.votes = votes
        self.encode_function, self.name = encode, name
        self.feedback, self.unbiased, self.contraction, self.variance = feedback, unbiased, contraction, variance
        self.doc = inspect.getdoc(encode) or ""
        parameters = list(inspect.signature(encode).parameters.values())
        for parameter in parameters[1:]:
            if parameter.default is parameter.empty:
                raise TraceError(
                    f"Expected a default for every option, got none for {parameter.name!r}", signature_line(encode),
                    "give it one, so that the name alone makes a compressor",
                )  # fmt: skip
        self.defaults = {parameter.name: parameter.default for parameter in parameters[1:]}
        self._signature = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters[1:]])
        self._class: type[TracedCompressor] | None = None
        self._decode_function: Callable[..., Any] | None = None
        self._programs: dict[tuple[Any, ...], Program] = {}

    def decode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator of the decoder; registers the compressor.

        Raises:
            TraceError: encoder or decoder cannot be traced.
        """
        self._decode_function, self._programs = function, {}
        self.trace(self.defaults)
        made = type(
            self.name,
            (TracedCompressor,),
            {
                "name": self.name, "algorithm": self, "__doc__": self.doc or self.name,
                "__module__": self.encode_function.__module__, "__qualname__": self.encode_function.__qualname__,
                "__signature__": self._signature,
            },
        )  # fmt: skip
        self._class = register(made)
        return function

    def __call__(self, **options: Any) -> TracedCompressor:
        if self._class is None:
            raise TraceError(
                f"Expected a decoder for {self.name!r}, got none yet", signature_line(self.encode_function),
                f"decorate one with @{self.name}.decode",
            )  # fmt: skip
        return self._class(**options)

    def trace(self, options: dict[str, Any]) -> Program:
        """The program with these options."""
        assert self._decode_function is not None
        key = tuple(sorted(options.items()))
        if key not in self._programs:
            first_line = self.doc.split("\n")[0]
            self._programs[key] = trace(self.name, self.encode_function, self._decode_function, options, first_line)
        return self._programs[key]


@overload
def compressor(name: Callable[..., Any], /) -> Algorithm: ...


@overload
def compressor(
    name: str | None = None,
    *,
    feedback: Feedback = "error",
    unbiased: bool | Callable[..., bool] = False,
    contraction: Bound | None = None,
    variance: Bound | None = None,
    votes: bool = False,
) -> Callable[[Callable[..., Any]], Algorithm]: ...


def compressor(
    name: str | Callable[..., Any] | None = None,
    *,
    feedback: Feedback = "error",
    unbiased: bool | Callable[..., bool] = False,
    contraction: Bound | None = None,
    variance: Bound | None = None,
    votes: bool = False,
) -> Any:
    """Decorator: make a compressor of an encoder written in the language, and of the decoder that follows.

    Args:
        name: for `gradwire.make` and `gradwire.attach`; the function's own where not given.
        feedback: ``"error"`` for error feedback, which biased algorithms need; ``"none"`` for unbiased ones; or a
            function of the options by name that says which.
        unbiased: whether the mean of what is decoded, over the random numbers, is the gradient; or a function of the
            options by name that says so.
        contraction: δ of ‖g − decode(encode(g))‖² ≤ (1 − δ)‖g‖², a function of the number of elements and of the
            options by name; or None. It may give None for options with which there is no such δ.
        variance: ω of E‖g − decode(encode(g))‖² ≤ ω‖g‖², likewise, where unbiased; see `Compressor.variance`.
        votes: see `Compressor`.

    Returns:
        An `Algorithm`, which is complete once its `decode` has decorated a second function.
    """

    def wrap(encode: Callable[..., Any]) -> Algorithm:
        chosen = name if isinstance(name, str) else encode.__name__
        return Algorithm(encode, chosen, feedback, unbiased, contraction, variance, votes)

    return wrap(name) if callable(name) else wrap


def _checked(name: str, value: Any, default: Any) -> Any:
    """An option of the type of its default; those that mean the same everywhere in their range."""
    if isinstance(default, bool):
        return checks.flag(name, value)
    if name == "bits":
        if value not in (1, 2, 4, 8):
            raise OptionError(f"Expected bits to be 1, 2, 4 or 8, got {value!r}. Do: choose one of these.")
        return int(value)
    if name == "block":
        return checks.integer(name, value, 8, 1 << 20)
    if name in ("ratio", "sample"):
        return checks.real(name, value, 0.0, 1.0, low_open=True)
    if name == "warmup":
        return checks.integer(name, value, 0, 1 << 53)
    if name in ("threshold", "clip"):
        return checks.real(name, value, 0.0, math.inf, high_open=True)
    if isinstance(default, int):
        return checks.integer(name, value, -(1 << 53), 1 << 53)
    if isinstance(default, float):
        return checks.real(name, value, -math.inf, math.inf)
    return value


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
