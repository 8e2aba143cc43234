"""`filter(G, f).hash(slots)`: of the chosen elements, one for each slot of a table. A hash of positions assigns slots.

Elements are written to their slots in order, so the last of those that share a slot is kept. The hash function is drawn
from the private stream: collisions differ between steps, ranks and tensors. One sweep over the gradient is enough,
without a prefix sum.

Source: DRAGONN (Wang et al. 2022), algorithm 1. Differences: the list is in the order of elements and has no empty
slots, so that positions take few bits and position 0 needs no special case.
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
        table = np.full(slots, -1, np.int64)
        a, b = hash_numbers(env.private_key)
        for slot, i in zip(hash_slots(index, a, b, slots).tolist(), index.tolist()):
            table[slot] = i
        kept = np.sort(table[table >= 0]).astype(np.uint32)
        return Pairs(kept, np.asarray(inputs[0], np.float32)[kept])

    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        listing = lookup("filter")
        assert isinstance(listing, Sink)
        emission = listing.cpu(node, name, value, mask)
        emission.before += [
            f"{name}_taken = np.empty(({name}_slots >> 6) + 1, np.uint64)",
            f"{name}_places = array_at(room, {name}_capacity, u32)",
            f"room += np.uint64(4 * {name}_capacity)",
        ]
        arguments = [f"{name}_{each}" for each in ("index", "value", "count", "taken", "slots", "places")]
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
