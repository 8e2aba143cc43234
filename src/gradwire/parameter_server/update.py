"""Pushes and updates on the wire. An update has the workers that were counted, then the encoded change.

The update of a dropped step has no change, and names the workers whose gradients were dropped.

Workers and server apply the same changes in the same order with the same kernel, so that all hold the same bits.
"""

# Shapes: N = elements of the parameter, n = workers.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.registry import code
from gradwire.core.context import Context
from gradwire.core.errors import FrameError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.parameter_server.session import TrainingConfig
from gradwire.wire.frame import FrameFlags, FrameKind, Header
from gradwire.wire.payload import Payload

PULL_STAGE = 1


def push_context(config: TrainingConfig, tensor: int, worker: int, step: int) -> Context:
    """The context of a worker's gradient."""
    parameter = config.tensors[tensor]
    return Context(parameter.name, step, worker, config.workers, config.seed, spec=parameter.spec)


def pull_context(config: TrainingConfig, tensor: int, step: int) -> Context:
    """The context of a change. The server is the rank after the workers, and changes are float32."""
    parameter = config.tensors[tensor]
    return Context(
        parameter.name, step, config.workers, config.workers, config.seed,
        stage=PULL_STAGE, spec=change_spec(parameter.spec),
    )  # fmt: skip


def frame_header(
    config: TrainingConfig, tensor: int, epoch: int, kind: FrameKind, sender: int, step: int = 0,
    flags: FrameFlags = FrameFlags.NONE, count: int | None = None,
) -> Header:  # fmt: skip
    """The header of a frame about a parameter: a push, an update, or values. By default, of all its elements."""
    parameter = config.tensors[tensor]
    compressors = {FrameKind.PAYLOAD: parameter.push_compressor, FrameKind.DELTA: parameter.pull_compressor}
    return Header(
        kind, code(compressors[kind].name) if kind in compressors else 0, flags, sender,
        PULL_STAGE if sender == config.workers else 0, ELEMENT_TYPES[parameter.spec.dtype], epoch, step, tensor,
        count=parameter.spec.numel if count is None else count,
    )  # fmt: skip


def change_spec(spec: TensorSpec) -> TensorSpec:
    """Spec of a parameter's change: float32, whatever the element type of the parameter."""
    return TensorSpec(spec.shape)


def add_change(compressor: Compressor, payload: Payload, ctx: Context, values: torch.Tensor) -> None:
    """Decode a change and add it to `values` in place.

    Raises:
        PayloadError: It does not decode.
    """
    with torch.no_grad():
        if values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous():
            compressor.decode(payload, ctx, out=values.detach(), accumulate=True)
        else:
            change = compressor.decode(payload, ctx)
            values.copy_((values.detach().to("cpu", torch.float32) + change).to(values.dtype))


def counted_bytes(workers: int) -> int:
    """Bytes in front of an update's payload: one bit per worker."""
    return -(-workers // 8)


def join_update(named: Iterable[int], workers: int, payload: Payload | None) -> np.ndarray:
    """The body of an update (uint8). Without a payload, the step was dropped."""
    bits = np.zeros(8 * counted_bytes(workers), np.uint8)
    bits[list(named)] = 1
    names = np.packbits(bits, bitorder="little")
    return names if payload is None else np.concatenate([names, payload.body])


def split_update(header: Header, body: np.ndarray, workers: int) -> tuple[frozenset[int], Payload | None]:
    """The workers that an update names, and its change; None for a dropped step.

    Raises:
        FrameError: The body is too short, too long for a dropped step, or names a worker that does not exist.
    """
    size = counted_bytes(workers)
    if body.nbytes < size:
        raise FrameError(f"An update has at least {size} bytes, but this one has {body.nbytes}.")
    named = np.flatnonzero(np.unpackbits(body[:size], bitorder="little"))
    if named.size and named[-1] >= workers:
        raise FrameError(f"An update names worker {named[-1]}, but there are {workers} workers.")
    if header.flags & FrameFlags.DROPPED:
        if body.nbytes > size:
            raise FrameError(f"An update of a dropped step has no change, but this one has {body.nbytes - size} bytes.")
        return frozenset(named.tolist()), None
    nonfinite = bool(header.flags & FrameFlags.NONFINITE)
    return frozenset(named.tolist()), Payload(body[size:], nonfinite)
