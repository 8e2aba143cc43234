"""Read and write machine words at any byte of an array, for bit streams."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def _pointer(context, builder, array, value, index, index_type):
    struct = context.make_array(array)(context, builder, value)
    place = builder.gep(struct.data, [context.cast(builder, index, index_type, types.intp)])
    return builder.bitcast(place, _WORD.as_pointer())


def _expect_bytes(array):
    if array.dtype != types.uint8 or array.layout != "C" or array.ndim != 1:
        raise TypingError("Expected a contiguous one-dimensional array of uint8.")


@intrinsic
def peek(typingctx, array, index):
    """Eight bytes from `index` on as a little-endian uint64. All of them must lie inside the array."""
    _expect_bytes(array)

    def codegen(context, builder, sig, args):
        return builder.load(_pointer(context, builder, array, args[0], args[1], sig.args[1]), align=1)

    return types.uint64(array, index), codegen


@intrinsic
def poke(typingctx, array, index, word):
    """Write a uint64 as eight bytes from `index` on. All of them must lie inside the array."""
    _expect_bytes(array)

    def codegen(context, builder, sig, args):
        value = context.cast(builder, args[2], sig.args[2], types.uint64)
        builder.store(value, _pointer(context, builder, array, args[0], args[1], sig.args[1]), align=1)
        return context.get_dummy_value()

    return types.void(array, index, word), codegen
