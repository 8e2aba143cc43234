"""`filter(G, f).hash(slots)`: of the chosen elements, one for each slot of a table. A hash of positions assigns slots.

Of the elements that share a slot, the one of largest magnitude is kept, and of equal ones the first. The hash function
is drawn from the private stream: collisions differ between steps, ranks and tensors. One sweep over the gradient is
enough, without a prefix sum.

Source: DRAGONN (Wang et al. 2022), algorithm 1. Differences: there, the last element to be written is kept. The list is
in the order of elements and has no empty slots, so that positions take few bits and position 0 needs no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.reference.hashing import hash_numbers, hash_slots
from gradwire.lang.ir import FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import DeviceEmission, Emission, FitError, Sink, lookup, register
from gradwire.lang.operators.filter import Pairs


class Hash(Sink):
    """Inputs: values, a mask, and the number of slots."""

    name: ClassVar[str] = "hash"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "elements" or inputs[1].space.kind != "elements":
            raise FitError("only elements can be filtered", "filter the gradient once, with & between conditions")
        return Space("items"), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        index, slots = np.flatnonzero(inputs[1]).astype(np.uint32), max(0, int(inputs[2]))
        if slots == 0:
            index = index[:0]
        value = np.asarray(inputs[0], np.float32)[index]
        largest_first = np.argsort(-np.abs(value), kind="stable")  # of equal magnitudes, the first position
        slot = hash_slots(index[largest_first], *hash_numbers(env.private_key), max(slots, 1))
        kept = np.sort(largest_first[np.unique(slot, return_index=True)[1]])
        return Pairs(index[kept], value[kept])

    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        listing = lookup("filter")
        assert isinstance(listing, Sink)
        emission = listing.cpu(node, name, value, mask)
        emission.before += [
            f"{name}_largest = np.empty({name}_slots, np.uint32)",
            f"{name}_places = array_at(room, {name}_capacity, u32)",
            f"room += np.uint64(4 * {name}_capacity)",
        ]
        arguments = [f"{name}_{each}" for each in ("index", "value", "count", "largest", "slots", "places")]
        emission.after = [f"{name}_count = keep_hashed({', '.join(arguments)}, keys)"]
        return emission

    def triton(self, node: Node, name: str, value: str, chosen: str) -> DeviceEmission:
        return DeviceEmission(
            {},
            [f"store_hashed({name}_table, {name}_numbers, {name}_slots, i, {value}, {chosen})"],
            [f"{name}_index, {name}_value = hashed_list({name}_table)", f"{name}_count = {name}_index.numel()"],
            before=[
                f"{name}_table, {name}_numbers = hash_table({name}_slots, grad), hash_numbers(keys, grad)",
            ],
            takes=[f"{name}_table", f"{name}_numbers", f"{name}_slots"],
        )


register(Hash())
