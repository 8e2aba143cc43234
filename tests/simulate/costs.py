"""Costs and models that make oracles simple: only what a test names takes time."""

from typing import Any

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, LinearCost
from gradwire.simulate import SimulatedGradient, SimulatedModel

DENSE = CodecCosts(FREE, FREE, FREE, LinearCost(0.0, 4.0))


def costs(task: float = 0.0, add: LinearCost = FREE, frame: LinearCost = FREE, **codecs: CodecCosts) -> Costs:
    """Frames without headers, dense gradients that cost the processor nothing, and the codecs of a test."""
    links = (LinkCosts(0.0, 0.0),)
    return Costs(1, links, {"none": DENSE, **codecs}, add=add, task=task, frame=frame, frame_bytes=0.0)


def onebit(encode: float = 0.0, decode: float = 0.0) -> CodecCosts:
    """Costs in seconds per element, with the payload sizes of the real onebit."""
    sizes = (1024, 1 << 20)
    nbytes = [make("onebit").max_encoded_bytes(TensorSpec((size,))) for size in sizes]
    slope = (nbytes[1] - nbytes[0]) / (sizes[1] - sizes[0])
    line = LinearCost(max(0.0, nbytes[0] - slope * sizes[0]), slope)
    return CodecCosts(LinearCost(0.0, encode), LinearCost(0.0, decode), LinearCost(0.0, decode), line)


def summed(payload_bytes: float = 0.0, squares: bool = False) -> CodecCosts:
    """Costs of a compressor with a preliminary round whose payloads add up: no time, and bytes per element."""
    return CodecCosts(
        FREE, FREE, FREE, LinearCost(0.0, payload_bytes),
        stats=FREE, stats_bytes=FREE, accumulate=FREE, finalize=FREE, accumulator_bytes=FREE, squares=squares,
    )  # fmt: skip


def gradients(*numels: int, ready: float = 0.0) -> list[SimulatedGradient]:
    """Gradients of matrices of these numbers of elements, all ready at once."""
    return [
        SimulatedGradient(f"layer{index}.weight", (numel // 1024, 1024), ready) for index, numel in enumerate(numels)
    ]


def model(*numels: int, ready: float = 0.0, **options: Any) -> SimulatedModel:
    """A model of such matrices."""
    return SimulatedModel(gradients(*numels, ready=ready), **options)
