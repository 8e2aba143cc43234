"""GCOMP: `lossless`, after rounding off the bits of each gradient that the parameter update would not notice.

Needs the parameter and the state of its optimizer in addition to the gradient; `attach(ddp, "gcomp", optimizer=opt)`
provides them. `support.gcomp_metric` explains which bits go, and what that guarantees. If a context has no such state
in `aux`, all bits are kept. What is lost is not kept as a residual, since no update would show it.

Levels, the numbers of bits that elements lose, are *derived* where both ends hold the same state: the limits of the
update and an element's exponent give its level, to the bit, and elements are rounded to nearest. Elsewhere levels are
*sent*: two bits per element name one of four, and elements are truncated.

`ctx.aux` has these entries for the elements of the range: ``parameter``; ``first`` and ``second``, the moments of the
optimizer, if it has any; ``numbers``, see `kernels.update_limits`; ``loss_scale``; ``clipped``, which has the same
meaning as the option; and ``common``, whether all ranks that decode the payload have the same bits in all of these. A
decoder needs `aux` for payloads with derived levels (`decodes_with_aux`).

Body: as for `lossless`. With derived levels, the kind is 3, and a CRC-32C of the margins follows the header, uint32;
then the output of `kernels.pack_rounded`.

Source: GCOMP (SoCC 2024). Differences: derived levels; those of `support.gcomp_metric` and `support.float_packing`.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import google_crc32c
import numpy as np
import torch

from gradwire.compressors.base.array import NONFINITE, expect, scratch
from gradwire.compressors.base.options import choice, flag
from gradwire.compressors.base.registry import register
from gradwire.compressors.none import ARRAY_DTYPES, convert
from gradwire.compressors.support.float_packing import HEADER, HEADER_BYTES, KIND, MAGIC, FloatPacking
from gradwire.compressors.support.gcomp_metric import guard
from gradwire.core import buffers, host
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError, StateMismatchError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.float_format import FORMATS, LEVELS
from gradwire.wire.payload import Payload

# Elements that stay in a core's cache while they are scaled and cut.
_CHUNK = 1 << 15


_DIGEST = struct.Struct("<I")
_ROUNDED = 3  # the kind of a body with derived levels
_START = HEADER_BYTES + _DIGEST.size
_MARGINS = "margins"  # entry of `aux`
_CHOICES = {"levels": ("auto", "derived", "sent"), "rate": ("current", "lasting")}


@register
class GComp(FloatPacking):
    """`lossless`, without the bits that the optimizer's update would not notice.

    Args:
        table: Prefix code to begin with, the same on all ranks; see `FloatPacking`. By default a built-in one.
        refresh: Number of steps after which each tensor gets a new code, made from its averaged gradient; 0 for never.
        clipped: Whether `clip_grad_norm_` scales gradients before the optimizer's step. If true, elements of float32
            lose at most 7 bits, and those of 16 bits none, so that the norm stays the same.
        levels: How a receiver knows the bits that an element has lost. ``"auto"``: it derives them from parameters and
            optimizer where ranks hold the same; if ranks turn out to differ, that step is skipped, and levels are sent
            from then on. ``"derived"``: the same, but a difference is an error. ``"sent"``: always sent.
        rate: Learning rate that counts with moments. ``"current"``: the present one, once it has stopped rising.
            ``"lasting"``: the highest one that a scheduler has recorded, so that a gradient's trace in a moment stays
            within the bound if the rate rises again.
    """

    name: ClassVar[str] = "gcomp"
    exact = False
    unbiased = False
    unique_encoding = False  # levels may be sent or derived
    needs_optimizer = True

    def __init__(
        self,
        table: str = "",
        refresh: int = 50,
        clipped: bool = False,
        levels: str = "auto",
        rate: str = "current",
    ) -> None:
        super().__init__(table, refresh)
        self.clipped = flag("clipped", clipped)
        self.levels = choice("levels", levels, _CHOICES["levels"])
        self.rate = choice("rate", rate, _CHOICES["rate"])

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {**super().options, "clipped": self.clipped, "levels": self.levels, "rate": self.rate}

    def contraction(self, spec: TensorSpec) -> float | None:
        """None: subnormal numbers may be cut to zero."""
        return None

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Size of the tensor, of a header, and of a digest."""
        return super().max_encoded_bytes(spec) + _DIGEST.size

    def decodes_with_aux(self, payload: Payload) -> bool:
        """Whether levels are derived."""
        return payload.body.nbytes >= HEADER_BYTES and int(payload.body[KIND]) == _ROUNDED

    def _num_levels(self, ctx: Context, dtype: torch.dtype) -> int:
        """Number of levels above 0 that may be used."""
        if "numbers" not in ctx.aux or dtype == torch.float64:
            return 0
        clipped = self.clipped or bool(ctx.aux.get("clipped", False))
        return (1 if dtype == torch.float32 else 0) if clipped else LEVELS - 1

    def _pack(self, x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context) -> tuple[Payload, np.ndarray]:
        levels = self._num_levels(ctx, dtype)
        if not levels:
            elements = self._elements_to_send(x, dtype, scale)
            body, finite = self._body(elements, dtype, ctx)
            return (Payload(body) if finite else NONFINITE), elements
        if self.levels == "sent" or not bool(ctx.aux.get("common", False)):
            elements, finite = _truncated(x, dtype, scale, ctx, levels)
            return (Payload(self._body(elements, dtype, ctx)[0]) if finite else NONFINITE), elements
        elements = scratch(dtype.itemsize * x.size).view(ARRAY_DTYPES[dtype])
        if not convert(x, elements, scale):
            return NONFINITE, elements
        margins, most = _margins(ctx, x.size), _most_lost(levels, elements)
        kernels.round_floats(elements, margins, most, elements)
        return Payload(self._rounded_body(elements, margins, most, dtype, ctx)), elements

    def _rounded_body(
        self, elements: np.ndarray, margins: np.ndarray, most: int, dtype: torch.dtype, ctx: Context
    ) -> np.ndarray:
        body, code = buffers.empty(_START + elements.nbytes), self.code(dtype, ctx.state)
        length = kernels.pack_rounded(elements, margins, most, code, body[_START:])
        if length < 0:
            return self._body(elements, dtype, ctx)[0]
        HEADER.pack_into(body.data, 0, MAGIC, _ROUNDED, ELEMENT_TYPES[dtype], code.number)
        _DIGEST.pack_into(body.data, HEADER_BYTES, _digest(margins, most))
        return body[: _START + length]

    def _elements(
        self, payload: Payload, ctx: Context, dtype: torch.dtype, target: np.ndarray, fits: bool = False
    ) -> np.ndarray:
        if not payload.nonfinite:
            return super()._elements(payload, ctx, dtype, target, fits)
        self._expect_bytes(payload, 0)
        return as_array(host.empty(target.size, dtype).fill_(torch.nan))

    def decode_sum(
        self, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, stats: Sequence[np.ndarray] = ()
    ) -> torch.Tensor:
        """See `Compressor`. If payloads share a context's `aux`, their margins are found once."""
        aux = ctxs[0].aux if ctxs else {}
        if "numbers" in aux and sum(map(self.decodes_with_aux, payloads)) > 1 and all(ctx.aux is aux for ctx in ctxs):
            aux = {**aux, _MARGINS: torch.from_numpy(_margins(ctxs[0], out.numel()))}
            ctxs = [replace(ctx, aux=aux) for ctx in ctxs]
        return super().decode_sum(payloads, ctxs, out, stats)

    def _unpack(self, payload: Payload, dtype: torch.dtype, elements: np.ndarray, ctx: Context) -> None:
        if not self.decodes_with_aux(payload):
            super()._unpack(payload, dtype, elements, ctx)
            return
        body, code = payload.body, self.code(dtype, ctx.state)
        expect(body.nbytes >= _START, f"at least {_START} bytes", body.nbytes, self.name)
        _, number = self._kind_and_number(body, dtype)
        expect(number == code.number, f"words of the table {code.number:#010x}", f"{number:#010x}", self.name)
        levels = self._num_levels(ctx, dtype)
        margins, most = (_margins(ctx, elements.size), _most_lost(levels, elements)) if levels else (None, 0)
        if margins is None or _DIGEST.unpack_from(body.data, HEADER_BYTES)[0] != _digest(margins, most):
            kind = PayloadError if self.levels == "derived" else StateMismatchError
            raise kind(
                "The sender has other parameters or another optimizer state than this rank. "
                'Make ranks equal before training, or use gw.make("gcomp", levels="sent").'
            )
        packed = kernels.unpack_rounded(body[_START:], margins, most, code, elements)
        expect(packed, f"what packs {elements.size} rounded elements", "something else", self.name)


def _margins(ctx: Context, count: int) -> np.ndarray:
    """Margins of the elements of the range (see `kernels.margins_of`), uint8[N]."""
    if _MARGINS in ctx.aux:
        return as_array(ctx.aux[_MARGINS])
    margins, limits = buffers.empty(count), np.empty(min(count, _CHUNK), np.float32)
    for chunk, found in _limits(ctx, count, limits):
        kernels.margins_of(found, _guard(ctx), margins[chunk])
    return margins


def _guard(ctx: Context) -> float:
    return guard(ctx.world_size, ctx.error_share) / float(ctx.aux["loss_scale"])


def _limits(ctx: Context, count: int, memory: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Limits of the elements, chunk by chunk, in the same memory."""
    parameter, numbers = as_array(ctx.aux["parameter"]), as_array(ctx.aux["numbers"])
    if parameter.size != count:
        raise ValueError(f"aux has {parameter.size} elements of the parameter, but the gradient has {count}.")
    moments = [as_array(ctx.aux[name]) if name in ctx.aux else None for name in ("first", "second")]
    for start in range(0, count, _CHUNK):
        chunk = slice(start, min(count, start + _CHUNK))
        first, second = (None if moment is None else moment[chunk] for moment in moments)
        limits = memory[: chunk.stop - start]
        kernels.update_limits(parameter[chunk], first, second, numbers, limits)
        yield chunk, limits


def _most_lost(levels: int, elements: np.ndarray) -> int:
    """Most bits that an element may lose. By rounding, one more than by truncation changes it by as much."""
    return levels * FORMATS[elements.dtype].step + 1


def _digest(margins: np.ndarray, most: int) -> int:
    return int(google_crc32c.extend(most, margins))


def _truncated(x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context, levels: int) -> tuple[np.ndarray, bool]:
    """Scale · x without the bits that the update does not notice, in scratch memory, and whether it is finite."""
    memory = scratch(4 * _CHUNK + dtype.itemsize * x.size)
    limits, elements = memory[: 4 * _CHUNK].view(np.float32), memory[4 * _CHUNK :].view(ARRAY_DTYPES[dtype])
    least = _guard(ctx)
    for chunk, found in _limits(ctx, x.size, limits):
        values = elements[chunk]
        if not convert(x[chunk], values, scale):
            return elements, False
        kernels.truncate_floats(values, found, least, values, levels)
    return elements, True
