"""`sample`: a list of elements from all parts of the gradient.

The gradient is divided into as many equal parts as there are samples, and one element of each is drawn with the private
stream. No part of the tensor is missed, and the expected mean of the samples is the mean of the elements.

Source: DGC (Lin et al. 2018), section 3.1. Differences: stratified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.reference.random import random32
from gradwire.lang.ir import BOOL, FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import FitError, Operator, register

SAMPLE_STREAM = 0x2545F491


def positions(size: int, count: int, key: int) -> np.ndarray:
    """Positions of `count` samples of `size` elements, int64[count]."""
    words = np.empty(count, np.uint32)
    random32(key ^ (SAMPLE_STREAM << 32), 0, words)
    j = np.arange(count, dtype=np.int64)
    start, end = j * size // max(count, 1), (j + 1) * size // max(count, 1)
    width = np.maximum(end - start, 1).astype(np.uint64)
    chosen: np.ndarray = start + ((words.astype(np.uint64) * width) >> np.uint64(32)).astype(np.int64)
    return chosen


class SampleOperator(Operator):
    """Inputs: elements, and the number of samples, which is clamped to 1..size (0 for an empty gradient)."""

    name: ClassVar[str] = "sample"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "elements" or inputs[0].dtype == BOOL:
            raise FitError(f"expected numbers of elements, not {inputs[0]!r}", "sample the gradient or a map of it")
        return Space("items"), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        count = min(env.size, max(1, int(inputs[1])))
        return np.asarray(inputs[0], np.float32)[positions(env.size, count, env.private_key)]


register(SampleOperator())
