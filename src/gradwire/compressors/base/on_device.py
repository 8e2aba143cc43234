"""Traced compressors on a GPU: their generated Triton code, called with tensors of one device and with contexts.

That device is a GPU, or the CPU where Triton interprets (TRITON_INTERPRET=1 in the environment before it is imported),
as in tests. Bodies, residuals and tensors are those of the generated code for the CPU, bit for bit.
"""
# Shapes: N = elements of the tensor or range, W = ranks, S = values of the preliminary round

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch

from gradwire.compressors.base import Stat
from gradwire.compressors.base.array import NONFINITE, ArrayCompressor, expect
from gradwire.core.context import Context
from gradwire.kernels.cpu.elements import as_writable
from gradwire.lang import cache
from gradwire.lang.ir import Program
from gradwire.wire.payload import Payload

_WORD = 0xFFFFFFFF


class DeviceCode:
    """What a compressor does on a device. All tensors lie there.

    Args:
        program: the traced compressor.
        static: gives what follows from length and step, as generated code takes it.
    """

    def __init__(self, program: Program, static: Callable[..., np.ndarray]) -> None:
        self.program, self._static = program, static

    @functools.cached_property
    def module(self) -> ModuleType:
        """The generated code.

        Raises:
            ModuleNotFoundError: Triton is not installed.
        """
        from gradwire.lang.gpu import emit

        try:
            return cache.load(f"{self.program.name}_triton", emit(self.program))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Expected Triton for {self.program.name} on a GPU, got {error}. Do: pip install 'gradwire[gpu]'."
            ) from error

    def measure(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> torch.Tensor:
        """The rank's values of the preliminary round, float32[S]; infinite where the gradient is not finite."""
        values: torch.Tensor = self.module.measure(
            grad, scale, None, key_words(ctx), ctx.offset, self._static(grad.numel(), ctx.step, remembered(ctx))
        )  # fmt: skip
        return values

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        *,
        scale: float = 1.0,
        residual: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Encode scale · grad + residual.

        Args:
            grad: N elements of any element type and shape.
            ctx: see `Compressor.encode`.
            scale: used as float32.
            residual: float32[N], or None for zero.
            rest: float32[N], which receives what the body does not carry; may be `residual`. None to drop it.
            stats: float32[S], the reduced values of the preliminary round, or None.

        Returns:
            The body, uint8; None where the gradient is not finite.
        """
        assert rest is not None or residual is None, "a residual without a place for the next one would be lost"
        body: torch.Tensor | None = self.module.encode(
            grad,
            scale,
            residual,
            rest,
            stats,
            key_words(ctx),
            ctx.offset,
            self._static(grad.numel(), ctx.step, remembered(ctx)),
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
        """Write the sum of what the bodies decode to, in their order, to `out`, or add what one decodes to.

        Args:
            bodies: uint8, as `encode` gave them or from anywhere.
            ctx: of any rank.
            out: float32, contiguous.
            accumulate: add to `out`; for one body.
            stats: as in `encode`.

        Returns:
            Whether the bodies are valid; if not, `out` may hold anything.
        """
        arguments = stats, key_words(ctx), ctx.offset, self._static(out.numel(), ctx.step)
        if len(bodies) == 1:
            return bool(self.module.decode(bodies[0], out, accumulate, *arguments))
        assert not accumulate, "sums of several payloads are written, not added"
        return bool(self.module.decode_sum(list(bodies), out, *arguments))


class OnDevice(ArrayCompressor):
    """The part of a traced compressor that deals with gradients and outputs on a GPU."""

    program: Program

    @functools.cached_property
    def on_device(self) -> DeviceCode:
        """The generated code for GPUs, which `encode` and `decode` run for tensors that lie on one."""
        return DeviceCode(self.program, self._static)

    @abstractmethod
    def _static(self, size: int, step: int, remembered: float = 0.0) -> np.ndarray:
        """What follows from length and step, as generated code takes it."""

    @abstractmethod
    def _given(self, stats: Sequence[np.ndarray]) -> np.ndarray | None:
        """The reduced values of the preliminary round, float32; None where there was none."""

    @abstractmethod
    def _expect_size(self, body: np.ndarray, size: int, stats: Sequence[np.ndarray]) -> None:
        """Raise `PayloadError` unless a body can have this length."""

    def _stats_on_device(self, grad: torch.Tensor, ctx: Context, scale: float) -> list[Stat]:
        values = self.on_device.measure(grad, ctx, scale).cpu().numpy()
        return [Stat(values[i : i + 1], node.attrs["function"]) for i, node in enumerate(self.program.stats)]

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> Payload:
        """Encode `grad`, where it lies; the body comes to the CPU."""
        if grad.is_cuda:
            return self._encode_on_device(grad, ctx, 1.0, None, residual, stats)
        return super().encode(grad, ctx, stats, residual)

    def _encode_on_device(
        self, grad: torch.Tensor, ctx: Context, scale: float, residual: np.ndarray | None, rest: np.ndarray | None,
        stats: Sequence[np.ndarray],
    ) -> Payload:  # fmt: skip
        """Encode on a GPU. Residuals are kept on the CPU: they cross the bus both ways."""
        old = None if residual is None else torch.from_numpy(residual).to(grad.device)
        new = None if rest is None else torch.empty(grad.numel(), dtype=torch.float32, device=grad.device)
        given = self._given_on(grad.device, stats)
        body = self.on_device.encode(grad, ctx, scale=scale, residual=old, rest=new, stats=given)
        if body is None:
            return NONFINITE
        if rest is not None and new is not None:
            torch.from_numpy(rest).copy_(new)
        return Payload(body.cpu().numpy())

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode `payload`, on the GPU where `out` lies on one."""
        if out is None or not out.is_cuda or payload.nonfinite or (accumulate and out.dtype != torch.float32):
            return super().decode(payload, ctx, out, accumulate, stats)
        out = self._output(ctx, out)
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._decode_on_device([payload], ctx, values, stats, accumulate)
        return out if values is out else out.copy_(values)

    def decode_sum(
        self,
        payloads: Sequence[Payload],
        ctxs: Sequence[Context],
        out: torch.Tensor,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode and add the payloads of several ranks, likewise."""
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


def remembered(ctx: Context) -> float:
    """What the encode of the step before left for this one; 0 for nothing."""
    found = ctx.aux.get("remembered")
    return 0.0 if found is None else float(found[0])


def key_words(ctx: Context) -> np.ndarray:
    """The words of the shared and of the private key, uint32[4]."""
    shared, private = ctx.shared_key, ctx.private_key
    return np.array([shared & _WORD, shared >> 32, private & _WORD, private >> 32], np.uint32)
