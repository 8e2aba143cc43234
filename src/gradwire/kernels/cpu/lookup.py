"""Lookup in a table of sixteen values, lane by lane.

x86 has instructions for it. For bytes, LLVM recognizes one in the pattern emitted here: one extraction per lane. For
words, AVX-512 has one, which is named: LLVM no longer sees the pattern where one lookup yields the index of another.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from gradwire.kernels.cpu.lanes import _lanes
from gradwire.kernels.cpu.vector import Vector, _ir

ENTRIES = 16
_HAS_PERMUTATION = bool(get_host_cpu_features().get("avx512f", False))


@intrinsic
def lookup(typingctx, table, indices):
    """The entries of a 16-lane table at these indices, which must be below 16."""
    if table.lanes != ENTRIES or indices.lanes % ENTRIES:
        raise TypingError(f"Expected a table of 16 lanes and a multiple of 16 indices, got {table} and {indices}.")
    target = Vector(table.element, indices.lanes)

    def codegen(context, builder, sig, args):
        is_words = table.element.bitwidth == indices.element.bitwidth == 32
        look_up = _permuted if _HAS_PERMUTATION and is_words else _looked_up
        pieces = [
            look_up(builder, args[0], _lanes(builder, args[1], first, ENTRIES))
            for first in range(0, indices.lanes, ENTRIES)
        ]
        while len(pieces) > 1:
            pieces = [_joined(builder, low, high) for low, high in zip(pieces[::2], pieces[1::2])]
        assert pieces[0].type == _ir(target)
        return pieces[0]

    return target(table, indices), codegen


def _permuted(builder, table, indices):
    name = "sf" if table.type.element == ir.FloatType() else "si"
    kind = ir.FunctionType(table.type, [table.type, indices.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.permvar.{name}.512")
    return builder.call(function, [table, indices])


def _looked_up(builder, table, indices):
    found = ir.Constant(table.type, ir.Undefined)
    for lane in range(ENTRIES):
        place = ir.Constant(ir.IntType(32), lane)
        entry = builder.extract_element(table, builder.extract_element(indices, place))
        found = builder.insert_element(found, entry, place)
    return found


def _joined(builder, low, high):
    count = low.type.count + high.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count))))
