"""CompLL in Python: a compressor is two short functions of symbolic gradients, compiled for CPU and GPU.

    import gradwire as gw
    from gradwire.lang import concat, floor, random, uint

    @gw.compressor(feedback="none", unbiased=True)
    def minmax(g, bits: int = 2):
        low, high = g.reduce(min), g.reduce(max)
        gap = (high - low) / (2**bits - 1)
        q = g.map(lambda x: floor((x - low) / gap + random(0, 1)), dtype=uint(bits))
        return concat(low=low, gap=gap, q=q)

    @minmax.decode
    def _(p):
        return p.q.map(lambda q: q * p.gap + p.low)

These functions may use what this module exports. `abs`, `max`, `min` and `sum` are Python's own.

Source: HiPress (Bai et al. 2021), section 4.
"""

from builtins import abs, max, min, sum  # noqa: UP029 - so that they can be imported with the others

from gradwire.lang import operators as operators
from gradwire.lang.errors import TraceError
from gradwire.lang.functions import (
    ceil,
    concat,
    count,
    exponent,
    floor,
    maximum,
    mean,
    minimum,
    norm,
    power,
    previous_state,
    random,
    round_even,
    sign,
    sqrt,
    step,
    uint,
    where,
)
from gradwire.lang.symbols import apply
from gradwire.lang.trace import trace
from gradwire.lang.types import (
    bfloat16,
    float16,
    float32,
    int8,
    int32,
    trit,
    uint1,
    uint2,
    uint4,
    uint8,
)

__all__ = [
    "TraceError",
    "abs",
    "apply",
    "bfloat16",
    "ceil",
    "concat",
    "count",
    "exponent",
    "float16",
    "float32",
    "floor",
    "int8",
    "int32",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "norm",
    "operators",
    "power",
    "previous_state",
    "random",
    "round_even",
    "sign",
    "sqrt",
    "step",
    "sum",
    "trace",
    "trit",
    "uint",
    "uint1",
    "uint2",
    "uint4",
    "uint8",
    "where",
]
