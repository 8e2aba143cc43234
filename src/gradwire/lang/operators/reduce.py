"""`reduce(G, f)`: reduce all elements, those of a block, or those chosen by a mask to one number.

The functions are `min`, `max`, `sum`, `mean`, `norm` (Euclidean) and `count`. The result for no elements is 0. `min`
and `max` leave out NaN. `count` of a condition counts the elements for which it holds. Sums have a canonical order, so
that all backends compute the same bits: 64 running sums in float64 over 1,024 elements, halved to one, then sums of
1,024 such sums in the same way.

Source: HiPress (Bai et al. 2021), table 4. Differences: fixed functions instead of user-defined ones, because each
needs an order of evaluation that all backends share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.layout import SUM_BLOCK
from gradwire.kernels.reference.reduce import block_sum64
from gradwire.lang.bounds import is_finite
from gradwire.lang.ir import BOOL, FLOAT, SCALAR, Dtype, Node, Space
from gradwire.lang.operators.base import DeviceEmission, Emission, FitError, Sink, register


class Reduce(Sink):
    """Inputs: values, and optionally a mask. Attributes: `function`, and `block` or 0."""

    name: ClassVar[str] = "reduce"
    functions = ("min", "max", "sum", "mean", "norm", "count")

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        space = inputs[0].space
        if space.kind not in ("elements", "items"):
            raise FitError(f"cannot reduce {space}", "reduce elements or a list, or use the value itself")
        if inputs[0].dtype == BOOL and attrs["function"] != "count":
            raise FitError("conditions have no order and no sum", "filter and reduce(count), or map with where")
        block = attrs["block"]
        if block and not 8 <= block <= 1 << 20:
            raise FitError(f"blocks have 8 to 2^20 elements, not {block}", "choose another size")
        return (Space("blocks", block) if block else SCALAR), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        values = np.asarray(inputs[0], np.float32)
        mask = np.ones(values.size, bool)
        if len(inputs) > 1 or node.inputs[0].dtype == BOOL:
            mask = np.asarray(inputs[-1], bool)
        block = node.attrs["block"]
        if not block:
            return _reduced(node.attrs["function"], values, mask)
        starts = range(0, values.size, block)
        found = [_reduced(node.attrs["function"], values[s : s + block], mask[s : s + block]) for s in starts]
        return np.array(found, np.float64)

    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        function = node.attrs["function"]
        count = f"{name}_count += popcount(mask_bits({mask}))"
        if function == "count":
            return Emission([f"{name}_count = 0"], [], [count], [], [f"{name} = np.float64({name}_count)"])
        if function in ("min", "max"):
            infinity, choose, lane = {
                "min": ("np.inf", "minimum", "smallest_lane"),
                "max": ("-np.inf", "maximum", "largest_lane"),
            }[function]
            emission = Emission(
                [f"{name}_lanes = splat(np.float32({infinity}), LANES)"],
                [],
                [f"{name}_lanes = {choose}(select({mask}, {value}, {name}_lanes), {name}_lanes)"],
                [],
                [f"{name} = extreme({lane}({name}_lanes))"],
            )
            if not is_finite(node.inputs[0]):  # then infinity can be the result
                emission.before.append(f"{name}_found = np.uint64(0)")
                emission.inside.append(f"{name}_found |= mask_bits({mask} & ({value} == {value}))")
                emission.after = [f"{name} = np.float64({lane}({name}_lanes)) + 0.0 if {name}_found != 0 else 0.0"]
            return emission
        wide = f"convert(select({mask}, {value}, splat(np.float32(0), LANES)), f64)"
        inside = [f"{name}_wide = {wide}", f"{name}_lanes = {name}_lanes + {name}_wide * {name}_wide"]
        if function != "norm":
            inside = [f"{name}_lanes = {name}_lanes + {wide}"]
        is_one_chunk = 0 < node.attrs["block"] <= SUM_BLOCK
        total = f"sum_lanes({name}_lanes)" if is_one_chunk else f"finish({name}_levels, {name}_fill)"
        after = {"sum": total, "mean": f"{total} / max({name}_count, 1)", "norm": f"np.sqrt({total})"}[function]
        start = f"{name}_lanes = splat(0.0, LANES)"
        emission = Emission([start], [], inside, [], [f"{name} = {after}"])
        if not is_one_chunk:
            emission.before, emission.chunk = [f"{name}_levels, {name}_fill = sums(n)"], [start]
            emission.end = [f"push({name}_levels, {name}_fill, np.int64(0), sum_lanes({name}_lanes))"]
        if function == "mean":
            emission.before.append(f"{name}_count = 0")
            emission.inside.append(count)
        return emission

    def triton(self, node: Node, name: str, value: str, chosen: str) -> DeviceEmission:
        function, parts, counts = node.attrs["function"], f"{name}_parts", f"{name}_counts"
        count = f"tl.store({counts} + chunk, chunk_count({chosen}))"
        if function == "count":
            return DeviceEmission({counts: "int32"}, [count], [f"{name} = finish_count({counts})"])
        if function in ("min", "max"):
            inside = f"tl.store({parts} + chunk, chunk_{function}({value}, {chosen}))"
            return DeviceEmission({parts: "float32"}, [inside], [f"{name} = finish_{function}({parts})"])
        summed = "chunk_sum_squares" if function == "norm" else "chunk_sum"
        emission = DeviceEmission(
            {parts: "float64"},
            [f"tl.store({parts} + chunk, {summed}(tl.where({chosen}, {value}, 0.0)))"],
            [f"{name} = finish_{function}({parts})"],
        )
        if function == "mean":
            emission.parts[counts] = "int32"
            emission.inside.append(count)
            emission.after = [f"{name} = finish_mean({parts}, {counts})"]
        return emission


def _reduced(function: str, values: np.ndarray, mask: np.ndarray) -> float:
    chosen = values[mask]
    if function == "count":
        return float(chosen.size)
    if function in ("min", "max"):
        chosen = chosen[~np.isnan(chosen)]
    if chosen.size == 0:
        return 0.0
    if function in ("min", "max"):
        return float(chosen.min() if function == "min" else chosen.max()) + 0.0
    wide = np.where(mask, values, np.float32(0)).astype(np.float64)
    total = float(block_sum64(wide * wide if function == "norm" else wide))
    if function == "norm":
        return float(np.sqrt(total))
    return total / chosen.size if function == "mean" else total


register(Reduce())
