"""Lookup in a table of sixteen values, lane by lane.

x86 has instructions for it. For bytes, LLVM recognizes one in the pattern emitted here: one extraction per lane. For
words it is named here: LLVM has none for AVX2, and with AVX-512 no longer sees the pattern where one lookup yields the
index of another.
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
_FEATURES = get_host_cpu_features()
# Words in a register that an instruction permutes, or 0 if there is none.
_PERMUTED = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 0
_PERMUTATIONS = {
    (16, True): "llvm.x86.avx512.permvar.sf.512",
    (16, False): "llvm.x86.avx512.permvar.si.512",
    (8, True): "llvm.x86.avx2.permps",
    (8, False): "llvm.x86.avx2.permd",
}


@intrinsic
def lookup(typingctx, table, indices):
    """The entries of a 16-lane table at these indices, which must be below 16."""
    if table.lanes != ENTRIES or indices.lanes % ENTRIES:
        raise TypingError(f"Expected a table of 16 lanes and a multiple of 16 indices, got {table} and {indices}.")
    target = Vector(table.element, indices.lanes)

    def codegen(context, builder, sig, args):
        is_words = table.element.bitwidth == indices.element.bitwidth == 32
        look_up = _permuted if _PERMUTED and is_words else _looked_up
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
    """With registers of half the table, a lookup in each half, of which one is chosen."""
    if _PERMUTED == ENTRIES:
        return _permute(builder, table, indices)
    low, high = (_lanes(builder, table, first, _PERMUTED) for first in (0, _PERMUTED))
    found = []
    for first in (0, _PERMUTED):
        part = _lanes(builder, indices, first, _PERMUTED)
        is_high = builder.icmp_unsigned(">=", part, ir.Constant(part.type, [_PERMUTED] * _PERMUTED))
        found.append(builder.select(is_high, _permute(builder, high, part), _permute(builder, low, part)))
    return _joined(builder, *found)


def _permute(builder, table, indices):
    kind = ir.FunctionType(table.type, [table.type, indices.type])
    name = _PERMUTATIONS[_PERMUTED, table.type.element == ir.FloatType()]
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [table, indices])


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
