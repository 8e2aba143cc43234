"""`random(a, b)`: a random number for each element, determined by (seed, step, name, element) and, unless `shared`,
the rank.

The number is (u + 1/2) / 65536 with sixteen random bits u of Philox4x32-7. Each call in an algorithm has a stream of
its own.

Source: HiPress (Bai et al. 2021), table 4; Salmon et al. 2011. Differences: counter-based, so that rounding errors of
elements, steps, ranks and tensors are independent, and a range draws the same numbers as the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.reference.random import random16
from gradwire.lang.ir import ELEMENTS, FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import Operator, register

STREAM_STEP = 0x85EBCA6B


def stream_key(key: int, stream: int) -> int:
    """The key of call number `stream` of `random`; its upper word differs."""
    return key ^ ((stream * STREAM_STEP & 0xFFFFFFFF) << 32)


class Random(Operator):
    """No inputs. Attributes: `shared`, and `stream`, the number of the call."""

    name: ClassVar[str] = "random"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return ELEMENTS, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        bits = np.empty(env.size, np.uint16)
        key = env.shared_key if node.attrs["shared"] else env.private_key
        random16(stream_key(key, node.attrs["stream"]), env.offset, bits)
        return (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-16)


register(Random())
