"""Load any element type as float32 vectors, and round them back. Contracts: `reference.elements`.

Numba has no float16 on the CPU: float16 arrays are passed as int16 views, bfloat16 arrays as uint16.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.cpu.vector import Vector, emit_load, emit_store, f32

# Elements processed at a time: their signs fit one machine word. LLVM splits them into registers.
LANES = 64

# Bits of a float32 without the sign, and of infinity.
MAGNITUDE = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000


@functools.cache
def _has_half_conversion() -> bool:
    """Whether one instruction converts float16. LLVM's fallback is a library call that Numba does not link."""
    return not platform.machine().lower().startswith(("x86", "amd64")) or get_host_cpu_features()["f16c"]


def as_input(x: np.ndarray) -> np.ndarray:
    """View of a gradient with the dtype that stands for its element type in kernels."""
    if x.dtype == np.float16:
        if not _has_half_conversion():
            raise TypeError("This CPU cannot convert float16: it has no F16C. Use float32 or bfloat16.")
        x = x.view(np.int16)
    elif x.dtype not in (np.float32, np.float64, np.uint16):
        raise TypeError(f"Expected float32, float64, float16 or uint16 (bfloat16 bits), got {x.dtype} (in a kernel).")
    return as_writable(x)


class _Memory:
    """Memory of an array, without its read-only flag."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def as_writable(array: np.ndarray) -> np.ndarray:
    """The array, or its memory as a writable array, for a kernel that only reads it.

    Received bytes are read-only. Numba treats them as another type and would compile every kernel twice.
    """
    return array if array.flags.writeable else np.asarray(_Memory(array))


def addresses(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """The address of each array, uint64[W]. Passing a list of arrays to Numba would be slow."""
    for array in arrays:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"Expected contiguous arrays of {dtype.__name__}, got {array.dtype} (in a kernel).")
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.uint64)


@intrinsic(prefer_literal=True)
def load_f32(typingctx, array, index, lanes):
    """Load `lanes` elements of any element type as float32; zeros past the end."""

    def codegen(context, builder, sig, args):
        loaded = emit_load(context, builder, array, args[0], args[1], sig.args[1], lanes.literal_value)
        return _WIDEN[array.dtype](builder, loaded, lanes.literal_value)

    return Vector(f32, lanes.literal_value)(array, index, lanes), codegen


@intrinsic
def store_f32(typingctx, array, index, values):
    """Round floats to nearest even in the element type of the array, and store them."""

    def codegen(context, builder, sig, args):
        rounded = _ROUND[array.dtype](builder, args[2], values.lanes)
        emit_store(context, builder, array, args[0], args[1], sig.args[1], rounded)
        return context.get_dummy_value()

    return types.void(array, index, values), codegen


def _integers(width, lanes):
    return ir.VectorType(ir.IntType(width), lanes)


def _words(value, lanes):
    return ir.Constant(_integers(32, lanes), [value] * lanes)


def _floats(lanes):
    return ir.VectorType(ir.FloatType(), lanes)


def _halves(lanes):
    return ir.VectorType(ir.HalfType(), lanes)


def _from_bfloat16(builder, bits, lanes):
    words = builder.zext(bits, _integers(32, lanes))
    return builder.bitcast(builder.shl(words, _words(16, lanes)), _floats(lanes))


def _to_bfloat16(builder, values, lanes):
    bits = builder.bitcast(values, _integers(32, lanes))
    upper = builder.lshr(bits, _words(16, lanes))
    bias = builder.add(builder.and_(upper, _words(1, lanes)), _words(0x7FFF, lanes))
    rounded = builder.lshr(builder.add(bits, bias), _words(16, lanes))
    # Rounding could turn a NaN into infinity: truncate it instead, and set the quiet bit so that it stays a NaN.
    quiet = builder.or_(upper, _words(0x40, lanes))
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.trunc(builder.select(is_nan, quiet, rounded), _integers(16, lanes))


def _unchanged(builder, values, lanes):
    return values


_WIDEN = {
    types.float32: _unchanged,
    types.float64: lambda builder, values, lanes: builder.fptrunc(values, _floats(lanes)),
    types.int16: lambda builder, bits, lanes: builder.fpext(builder.bitcast(bits, _halves(lanes)), _floats(lanes)),
    types.uint16: _from_bfloat16,
}
_ROUND = {
    types.float32: _unchanged,
    types.float64: lambda builder, values, lanes: builder.fpext(values, ir.VectorType(ir.DoubleType(), lanes)),
    types.int16: lambda builder, values, lanes: builder.bitcast(
        builder.fptrunc(values, _halves(lanes)), _integers(16, lanes)
    ),
    types.uint16: _to_bfloat16,
}


def _rounded(dtype):
    @intrinsic
    def rounded(typingctx, values):
        """Floats rounded to nearest even in a shorter type, returned as float32."""

        def codegen(context, builder, sig, args):
            return _WIDEN[dtype](builder, _ROUND[dtype](builder, args[0], values.lanes), values.lanes)

        return values(values), codegen

    return rounded


rounded_float16 = _rounded(types.int16)
rounded_bfloat16 = _rounded(types.uint16)
