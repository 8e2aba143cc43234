"""Costs that are described instead of measured: a data-center GPU that encodes, and a network card that moves frames.

They stand for the hardware of papers that is not at hand. They are rounded lower bounds: bytes moved by a codec over
700 GB/s of memory (a V100 reaches about that of its 900), 10 us for each kernel launch, 2 us of the engine for each
task and frame, no copies by the processor. Real kernels are slower than their bytes.
"""

from __future__ import annotations

from gradwire.compressors.base.registry import compressor_of
from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import CodecCosts, Costs, LinearCost, LinkCosts
from gradwire.simulate import SimulatedLink

MEMORY_BYTES_A_SECOND = 700e9
LAUNCH_SECONDS, TASK_SECONDS, FRAME_SECONDS, LATENCY_SECONDS = 10e-6, 2e-6, 2e-6, 5e-6
# Bytes of memory that encode, decode and merge move for an element: gradients and residuals are read and written in
# float32, a second sweep where the first only looks (means, thresholds, extremes).
BYTES = {"none": (8, 8, 12), "fp16": (6, 6, 10), "onebit": (20, 4, 8), "minmax": (8, 4, 8), "dgc": (28, 4, 4)}


def gpu_costs(*specs: str) -> Costs:
    """Costs of these compressors, and of ``"none"``."""
    codecs = {spec: _codec(spec) for spec in ("none", *specs)}
    return Costs(
        *(1, (LinkCosts(0.0, 0.0),), codecs),
        add=_kernel(12),
        task=TASK_SECONDS,
        frame=LinearCost(FRAME_SECONDS, 0.0),
        made_by="described: 700 GB/s of memory, 10 us a kernel, 2 us a task and a frame",
    )


def link() -> SimulatedLink:
    """A link without TCP headers. A sweep sets the rate."""
    return SimulatedLink(None, LATENCY_SECONDS, header_bytes=0)


def _kernel(nbytes: float) -> LinearCost:
    return LinearCost(LAUNCH_SECONDS, nbytes / MEMORY_BYTES_A_SECOND)


def _codec(spec: str) -> CodecCosts:
    encode, decode, merge = (_kernel(nbytes) for nbytes in BYTES[spec.partition(":")[0]])
    return CodecCosts(encode, decode, merge, _payload(spec))


def _payload(spec: str) -> LinearCost:
    """Payload bytes by elements: the kept fraction at 8 bytes each, or the bytes of the format."""
    compressor = compressor_of(spec)
    if "ratio" in compressor.options:
        return LinearCost(0.0, 8 * float(compressor.options["ratio"]))
    small, large = (compressor.max_encoded_bytes(TensorSpec((n,))) for n in _PROBES)
    slope = (large - small) / (_PROBES[1] - _PROBES[0])
    return LinearCost(max(0.0, small - slope * _PROBES[0]), slope)


_PROBES = (1 << 12, 1 << 20)
