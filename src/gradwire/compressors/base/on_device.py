"""Traced compressors on a GPU: generated Triton code, called with tensors of one device.

The device is a GPU, or in tests the CPU, with Triton's interpreter (TRITON_INTERPRET=1 in the environment before the
import). Bodies, residuals and tensors are the same as those of the generated code for the CPU, bit for bit.
"""
# Shapes: N = elements of the tensor or range, W = ranks, S = values of the preliminary round

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from gradwire.compressors.base.array import NONFINITE, ArrayCompressor, expect
from gradwire.compressors.base.contract import Stat
from gradwire.core.context import Context, key_words
from gradwire.kernels.cpu.elements import as_writable
from gradwire.lang import cache
from gradwire.lang.ir import Program
from gradwire.wire.payload import Payload

_WORD = 0xFFFFFFFF


class DeviceCode:
    """Encoder and decoder of a compressor on one device, which holds all tensors.

    Args:
        program: Traced program.
        static: Function of length, step and previous state that returns the values that follow from them.
    """

    def __init__(self, program: Program, static: Callable[..., np.ndarray]) -> None:
        self.program, self._static = program, static

    @functools.cached_property
    def module(self) -> ModuleType:
        """Generated code.

        Raises:
            ModuleNotFoundError: Triton is not installed.
        """
        from gradwire.lang.targets.triton import emit

        try:
            return cache.load(f"{self.program.name}_triton", emit(self.program))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{self.program.name} on a GPU needs Triton ({error}). Run pip install 'gradwire[gpu]'."
            ) from error

    def measure(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> torch.Tensor:
        """Values of this rank for the preliminary round, float32[S]; infinite if the gradient is not finite."""
        values: torch.Tensor = self.module.measure(
            grad, scale, None, key_words(ctx), ctx.offset, self._static(grad.numel(), ctx.step, previous_state(ctx))
        )  # fmt: skip
        return values

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        *,
        scale: float = 1.0,
        residual_in: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Encode scale · grad + residual_in.

        Args:
            grad: N elements of any element type and shape.
            ctx: See `Compressor.encode`.
            scale: Factor of the gradient, used as float32.
            residual_in: float32[N], or None for zeros.
            residual_out: float32[N] that receives the error of the encode; may be `residual_in`. None to drop it.
            stats: Reduced values of the preliminary round, float32[S], or None.

        Returns:
            The body, uint8; None if the gradient is not finite.
        """
        assert residual_out is not None or residual_in is None, "without residual_out, the error would be lost"
        body: torch.Tensor | None = self.module.encode(
            grad,
            scale,
            residual_in,
            residual_out,
            stats,
            key_words(ctx),
            ctx.offset,
            self._static(grad.numel(), ctx.step, previous_state(ctx)),
        )
        return body

    def decode(
        self,
        bodies: Sequence[torch.Tensor],
        ctx: Context,
        out: torch.Tensor,
        *,
        accumulate: bool = False,
        stats: torch.Tensor | None = None,
    ) -> bool:
        """Write the sum of the decoded bodies, in their order, to `out`, or add one decoded body to it.

        Args:
            bodies: Untrusted bytes, uint8.
            ctx: Context of any rank.
            out: Contiguous float32 tensor.
            accumulate: If true, add to `out`; for one body only.
            stats: As for `encode`.

        Returns:
            Whether the bodies are valid; if not, `out` may hold anything.
        """
        arguments = stats, key_words(ctx), ctx.offset, self._static(out.numel(), ctx.step)
        if len(bodies) == 1:
            return bool(self.module.decode(bodies[0], out, accumulate, *arguments))
        assert not accumulate, "sums of several payloads are written, not added"
        return bool(self.module.decode_sum(list(bodies), out, *arguments))


class OnDevice(ArrayCompressor):
    """The part of a traced compressor that handles gradients and outputs on a GPU."""

    program: Program

    @functools.cached_property
    def on_device(self) -> DeviceCode:
        """Generated code for GPUs, which `encode` and `decode` run for tensors on a GPU."""
        return DeviceCode(self.program, self._static)

    @abstractmethod
    def _static(self, size: int, step: int, previous_state: float = 0.0) -> np.ndarray:
        """Values that follow from length, step and previous state, as arguments of generated code."""

    @abstractmethod
    def _given(self, stats: Sequence[np.ndarray]) -> np.ndarray | None:
        """Reduced values of the preliminary round, float32; None without one."""

    @abstractmethod
    def _expect_size(self, body: np.ndarray, size: int, stats: Sequence[np.ndarray]) -> None:
        """Raise `PayloadError` unless a body can have this length."""

    def _stats_on_device(self, grad: torch.Tensor, ctx: Context, scale: float) -> list[Stat]:
        return self._as_stats(self.on_device.measure(grad, ctx, scale).cpu().numpy())

    def _as_stats(self, values: np.ndarray) -> list[Stat]:
        """Each value with its reduction over ranks. Infinite values, of a gradient that is not finite, outlast it."""
        functions = [node.attrs["function"] for node in self.program.stats]
        lost = np.isinf(values) & (np.array(functions) == "min")
        values = np.where(lost, np.float32(-np.inf), values)
        return [Stat(values[i : i + 1], function) for i, function in enumerate(functions)]

    def _encode_on_device(
        self, grad: torch.Tensor, ctx: Context, stats: Sequence[np.ndarray], scale: float,
        residual_in: np.ndarray | None, residual_out: np.ndarray | None,
    ) -> Payload:  # fmt: skip
        """Encode on a GPU; the body comes to the CPU. Residuals live on the CPU: they cross the bus both ways."""
        old = None if residual_in is None else torch.from_numpy(residual_in).to(grad.device)
        new = None if residual_out is None else torch.empty(grad.numel(), dtype=torch.float32, device=grad.device)
        given = self._given_on(grad.device, stats)
        body = self.on_device.encode(grad, ctx, scale=scale, residual_in=old, residual_out=new, stats=given)
        if body is None:
            return NONFINITE
        if residual_out is not None and new is not None:
            torch.from_numpy(residual_out).copy_(new)
        return Payload(body.cpu().numpy())

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode `payload`, on the GPU if `out` is on one."""
        if out is None or not out.is_cuda or payload.nonfinite or (accumulate and out.dtype != torch.float32):
            return super().decode(payload, ctx, out, accumulate, stats)
        out = self._output(ctx, out)
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._decode_on_device([payload], ctx, values, stats, accumulate)
        return out if values is out else out.copy_(values)

    def decode_sum(
        self, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, stats: Sequence[np.ndarray] = ()
    ) -> torch.Tensor:
        """Decode and add the payloads of several ranks, on the GPU if `out` is on one."""
        is_plain = out.dtype == torch.float32 and len(payloads) == len(ctxs) > 0
        if not out.is_cuda or not is_plain or any(payload.nonfinite for payload in payloads):
            return super().decode_sum(payloads, ctxs, out, stats)
        for ctx in ctxs:
            self._output(ctx, out)
        out.zero_()
        self._decode_on_device(payloads, ctxs[0], out, stats, len(payloads) == 1)
        return out

    def _decode_on_device(
        self, payloads: Sequence[Payload], ctx: Context, out: torch.Tensor, stats: Sequence[np.ndarray],
        accumulate: bool,
    ) -> None:  # fmt: skip
        for payload in payloads:
            self._expect_size(payload.body, out.numel(), stats)
        bodies = [torch.from_numpy(as_writable(payload.body)).to(out.device) for payload in payloads]
        given = self._given_on(out.device, stats)
        valid = self.on_device.decode(bodies, ctx, out, accumulate=accumulate, stats=given)
        expect(valid, "finite values, indices in range, whole runs", "others", self.name)

    def _given_on(self, device: torch.device, stats: Sequence[np.ndarray]) -> torch.Tensor | None:
        given = self._given(stats)
        return None if given is None else torch.from_numpy(given).to(device)


def previous_state(ctx: Context) -> float:
    """The value that the algorithm's `next_state` has left; 0 without one, or if the state is of something else."""
    state = ctx.state
    return float(state[0]) if state is not None and state.size == 1 and state.dtype == np.float32 else 0.0
