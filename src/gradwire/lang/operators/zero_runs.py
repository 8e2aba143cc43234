"""`zero_runs`: an array of trits in which a run of zeros takes one byte for up to 70 elements.

Five zeros are packed as the byte 121, and no packed byte is above 242. A run of 2 to 14 bytes 121 is sent as one byte,
243 + (length - 2). A longer run is split into runs of 14 from the start, so each array has one encoding, and decoders
accept no other. The length of the payload depends on the gradient, so the field must be the last; it is never longer
than without `zero_runs`.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.reference.zero_run import zero_run_decode, zero_run_encode
from gradwire.lang.ir import Dtype, Node, Space
from gradwire.lang.operators.base import Coding, FitError, register
from gradwire.lang.types import trit


class ZeroRuns(Coding):
    """Input: elements as trits."""

    name: ClassVar[str] = "zero_runs"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "elements" or inputs[0].dtype != trit:
            raise FitError(
                f"expected trits of all elements, not {inputs[0].dtype} of {inputs[0].space}",
                "use g.map(..., dtype=trit).zero_runs(); other types have no byte to spare for a run",
            )
        return inputs[0].space, inputs[0].dtype

    def shorten(self, packed: np.ndarray) -> np.ndarray:
        out = np.empty_like(packed)
        return out[: zero_run_encode(packed, out)]

    def expand(self, coded: np.ndarray, num_bytes: int) -> np.ndarray | None:
        packed = np.empty(num_bytes, np.uint8)
        return packed if zero_run_decode(coded, packed) == num_bytes else None

    def cpu_shorten(self, packed: str, out: str) -> str:
        return f"shorten_runs({packed}, {out})"

    def cpu_expand(self, coded: str, out: str) -> str:
        return f"expand_runs({coded}, {out})"

    def triton_shorten(self, body: str, at: str) -> str:
        return f"shorten_runs({body}, {at})"

    def triton_expand(self, body: str, at: str, num_bytes: str) -> str:
        return f"expand_runs({body}, {at}, {num_bytes})"


register(ZeroRuns())
