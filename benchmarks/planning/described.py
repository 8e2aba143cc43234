"""Costs of a GPU that is not at hand: what the device code does is counted, and times are assumed.

A codec's launches, operations, synchronizations and bytes are those of its generated Triton code
(`benchmarks.planning.device_counts`), with the gradient and the residual on the device, and payloads copied over the
bus from and to the host, which sends them. A job does not run this code yet: it copies gradients of a GPU to the host,
and encodes there. Compressors without device code have no costs here. The costs of tasks and frames are measured on a
processor, as is the dense sum of staged gradients. Frames are charged the processor time of an empty one: their bytes
are left to the network card.

A codec takes the sum of its parts. In reality, launches overlap with the kernels before them, which saves at most half.

Assumptions, as no GPU was at hand:

- A launch takes 10 us from Python. Published: 8.7 us (vllm-project/vllm#34838), 11 us (meta-pytorch/tritonbench#1002).
- An operation of torch takes 5 us, and a view or allocation 1 us. Nothing published; eager calls take microseconds.
- A copy between pageable host memory and the device takes 7 us and runs at 6 GB/s, as in a table of sizes in NVIDIA's
  forum (topic 56270). A synchronization is such a copy of a few bytes and the wait for it, 10 us.
- Staging copies pinned memory at 12 GB/s, over PCIe 3.0 x16. The fixed cost of these copies is left out.
- Device memory moves 700 GB/s, which a V100, the GPU of HiPress, reaches of its 900.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.planning import device_counts
from benchmarks.planning.device_counts import Counts
from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import CodecCosts, Costs
from gradwire.planner.curves import Cost, Curve, LinearCost
from gradwire.simulate import SimulatedLink

LAUNCH_SECONDS, OPERATION_SECONDS, VIEW_SECONDS, COPY_SECONDS, SYNC_SECONDS = 10e-6, 5e-6, 1e-6, 7e-6, 10e-6
MEMORY_BYTES_A_SECOND, PAGEABLE_BYTES_A_SECOND, PINNED_BYTES_A_SECOND = 700e9, 6e9, 12e9
LATENCY_SECONDS = 5e-6
MOST_MERGED = 16  # payloads of a merge that are counted
_PROBES = (1 << 12, 1 << 20)


def gpu_costs(*specs: str, host: Costs, ranks: int) -> Costs:
    """Costs of these compressors, and of ``"none"``, on the GPU.

    Args:
        *specs: Compressors with device code.
        host: Measured costs of the GPU's host: tasks, frames, and ``"none"``.
        ranks: Number of ranks, at least 2. One call merges the payloads of all, and costs are per payload. From
            `MOST_MERGED` ranks on, the cost per payload no longer falls.

    Raises:
        OptionError: A compressor has no device code, or a preliminary round.
    """
    dense = host.codec(DENSE_NAME)
    bus = 4 / PINNED_BYTES_A_SECOND
    staged = replace(dense, encode=_steeper(dense.encode, bus), decode=_steeper(dense.decode, bus))
    return replace(
        host,
        codecs={DENSE_NAME: staged, **{spec: device_costs(spec, ranks) for spec in specs}},
        add=LinearCost(OPERATION_SECONDS, 12 / MEMORY_BYTES_A_SECOND),
        frame=LinearCost(host.frame(0), 0.0),
        in_place=False,
        made_by=f"counted device code, assumed times; tasks and frames: {host.made_by}",
    )


def device_costs(spec: str, ranks: int) -> CodecCosts:
    """Costs of one compressor with device code; see `gpu_costs`."""
    num_merged = min(ranks, MOST_MERGED)
    codec, found, body = compressor_of(spec), device_counts.counts(spec, num_merged), _payload(spec)
    has_residual = not codec.exact and codec.default_feedback != "none"
    encode = seconds(found.encode_with_residual if has_residual else found.encode)
    bus = LinearCost(COPY_SECONDS + body.fixed / PAGEABLE_BYTES_A_SECOND, body.slope / PAGEABLE_BYTES_A_SECOND)
    whole = seconds(found.merge)
    merge = LinearCost(whole.fixed / num_merged, whole.slope / num_merged)
    return CodecCosts(_sum(encode, bus), _sum(seconds(found.decode), bus), _sum(merge, bus), body)


def seconds(counts: Counts) -> LinearCost:
    """Seconds of one call, by elements."""
    calls = (
        LAUNCH_SECONDS * counts.launches
        + OPERATION_SECONDS * counts.operations
        + VIEW_SECONDS * counts.views
        + COPY_SECONDS * counts.copies
        + SYNC_SECONDS * counts.syncs
    )
    return LinearCost(calls + counts.nbytes.fixed / MEMORY_BYTES_A_SECOND, counts.nbytes.slope / MEMORY_BYTES_A_SECOND)


def link() -> SimulatedLink:
    """A link without TCP headers. A sweep sets the rate."""
    return SimulatedLink(None, LATENCY_SECONDS, header_bytes=0)


def _sum(a: LinearCost, b: LinearCost) -> LinearCost:
    return LinearCost(a.fixed + b.fixed, a.slope + b.slope)


def _steeper(cost: Cost, slope: float) -> Cost:
    if isinstance(cost, LinearCost):
        return LinearCost(cost.fixed, cost.slope + slope)
    return Curve(tuple((x, y + slope * x) for x, y in cost.points))


def _payload(spec: str) -> LinearCost:
    """Bytes of payloads of random gradients, by elements."""
    codec, generator = compressor_of(spec), torch.Generator().manual_seed(0)
    small, large = (
        codec.encode(torch.randn(n, generator=generator), Context("tensor", spec=TensorSpec((n,)))).body.nbytes
        for n in _PROBES
    )
    slope = (large - small) / (_PROBES[1] - _PROBES[0])
    return LinearCost(max(0.0, small - slope * _PROBES[0]), slope)
