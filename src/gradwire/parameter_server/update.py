"""Updates on the wire: who was counted, then the encoded change of the parameter; and what both ends do with them.

The update of a step that was dropped has no change, and names the workers whose gradients were dropped with it.

A worker's values and the server's copy of them take the same changes in the same order by the same kernel, so that they
are the same bits.
"""

# Shapes: N = elements of the parameter, n = workers.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.context import Context
from gradwire.core.errors import FrameError
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.session import TrainingConfig
from gradwire.wire.frame import FrameFlags, Header
from gradwire.wire.payload import Payload

PULL_STAGE = 1


def push_context(agreement: TrainingConfig, tensor: int, worker: int, step: int) -> Context:
    """The context of a worker's gradient."""
    terms = agreement.tensors[tensor]
    return Context(terms.name, step, worker, agreement.workers, agreement.seed, spec=terms.spec)


def pull_context(agreement: TrainingConfig, tensor: int, step: int) -> Context:
    """The context of a change: that of one more rank than there are workers, in float32."""
    terms = agreement.tensors[tensor]
    return Context(
        terms.name, step, agreement.workers, agreement.workers, agreement.seed,
        stage=PULL_STAGE, spec=change_spec(terms.spec),
    )  # fmt: skip


def change_spec(spec: TensorSpec) -> TensorSpec:
    """What a change of a parameter is encoded as: float32, whatever the parameter's own type."""
    return TensorSpec(spec.shape)


def add_change(compressor: Compressor, payload: Payload, ctx: Context, values: torch.Tensor) -> None:
    """Decode a change and add it to `values` in place.

    Raises:
        PayloadError: it does not decode.
    """
    with torch.no_grad():
        if values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous():
            compressor.decode(payload, ctx, out=values.detach(), accumulate=True)
        else:
            change = compressor.decode(payload, ctx)
            values.copy_((values.detach().to("cpu", torch.float32) + change).to(values.dtype))


def counted_bytes(workers: int) -> int:
    """Bytes in front of an update's payload: a bit a worker."""
    return -(-workers // 8)


def join_update(named: Iterable[int], workers: int, payload: Payload | None) -> np.ndarray:
    """uint8: the body of an update; without a payload, of a step that was dropped."""
    bits = np.zeros(8 * counted_bytes(workers), np.uint8)
    bits[list(named)] = 1
    names = np.packbits(bits, bitorder="little")
    return names if payload is None else np.concatenate([names, payload.body])


def split_update(header: Header, body: np.ndarray, workers: int) -> tuple[frozenset[int], Payload | None]:
    """Who was counted, and the change; or whose gradients were dropped, and None.

    Raises:
        FrameError: too short, too long for a step that was dropped, or named is who does not exist.
    """
    size = counted_bytes(workers)
    if body.nbytes < size:
        raise FrameError(f"Expected an update of {size} bytes and more, got {body.nbytes}.")
    named = np.flatnonzero(np.unpackbits(body[:size], bitorder="little"))
    if named.size and named[-1] >= workers:
        raise FrameError(f"Expected workers below {workers} in an update, got {named[-1]}.")
    if header.flags & FrameFlags.DROPPED:
        if body.nbytes > size:
            raise FrameError(f"An update of a dropped step has no change, but this one has {body.nbytes - size} bytes.")
        return frozenset(named.tolist()), None
    nonfinite = bool(header.flags & FrameFlags.NONFINITE)
    return frozenset(named.tolist()), Payload(body[size:], nonfinite)
