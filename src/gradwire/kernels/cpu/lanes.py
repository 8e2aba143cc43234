"""Functions of a `Vector`: convert, reinterpret, choose, rearrange, reduce."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from gradwire.kernels.cpu.vector import Vector, _broadcast, _cut, _ir, _is_float, _is_signed


@intrinsic(prefer_literal=True)
def splat(typingctx, value, lanes):
    """The same scalar in every lane."""
    vector = Vector(types.unliteral(value), lanes.literal_value)

    def codegen(context, builder, sig, args):
        scalar = context.cast(builder, args[0], value, vector.element)
        return _broadcast(builder, scalar, _ir(vector))

    return vector(value, lanes), codegen


@intrinsic
def bitcast(typingctx, vector, dtype):
    """The same bits as another element type of the same width."""
    target = Vector(dtype.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _ir(target))

    return target(vector, dtype), codegen


@intrinsic
def convert(typingctx, vector, dtype):
    """The same values as another element type: sign-extended, truncated, or rounded to nearest even.

    A float to an integer truncates toward zero and must be in range.
    """
    target = Vector(dtype.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        return _conversion(builder, vector, target)(args[0], _ir(target))

    return target(vector, dtype), codegen


def _conversion(builder, source, target):
    def width(vector):
        return 1 if vector.element == types.boolean else vector.element.bitwidth

    wider, equal = width(target) > width(source), width(target) == width(source)
    if _is_float(source) and _is_float(target):
        return builder.fpext if wider else builder.fptrunc
    if _is_float(source):
        return builder.fptosi if _is_signed(target) else builder.fptoui
    if _is_float(target):
        return builder.sitofp if _is_signed(source) else builder.uitofp
    if equal:
        return builder.bitcast
    if not wider:
        return builder.trunc
    return builder.sext if _is_signed(source) else builder.zext


@intrinsic
def select(typingctx, mask, a, b):
    """A where the mask is true, else b. No arithmetic: a NaN that is not chosen has no effect."""
    if a != b:
        raise TypingError(f"Expected two vectors of one type, got {a} and {b}.")

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    return a(mask, a, b), codegen


def _chosen(builder, vector, sign, a, b):
    """A where the comparison with b holds, else b."""
    compare = builder.icmp_unsigned
    if _is_float(vector):
        compare = builder.fcmp_ordered
    elif _is_signed(vector):
        compare = builder.icmp_signed
    return builder.select(compare(sign, a, b), a, b)


def _extreme(sign):
    @intrinsic
    def extreme(typingctx, a, b):
        """The smaller or larger of two values in each lane; b where a is NaN."""
        if a != b:
            raise TypingError(f"Expected two vectors of one type, got {a} and {b}.")

        def codegen(context, builder, sig, args):
            return _chosen(builder, a, sign, *args)

        return a(a, b), codegen

    return extreme


maximum = _extreme(">")
minimum = _extreme("<")


@intrinsic(prefer_literal=True)
def lanes_below(typingctx, count, lanes):
    """A mask of the first `count` lanes."""
    width = lanes.literal_value

    def codegen(context, builder, sig, args):
        # A comparison of lanes as wide as the floats that the mask chooses. AVX2 has no registers for masks, and would
        # make one from bits lane by lane.
        lane = ir.IntType(32)
        indices = ir.Constant(ir.VectorType(lane, width), list(range(width)))
        below = builder.trunc(_cut(builder, args[0], width), lane)
        return builder.icmp_signed("<", indices, _broadcast(builder, below, indices.type))

    return Vector(types.boolean, width)(types.int64, lanes), codegen


@intrinsic
def mask_bits(typingctx, mask):
    """A mask as the bits of an unsigned integer; lane 0 is the least significant."""
    target = getattr(types, f"uint{mask.lanes}")

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(mask.lanes))

    return target(mask), codegen


@intrinsic
def as_bytes(typingctx, bits):
    """The bytes of an unsigned integer, least significant first."""
    target = Vector(types.uint8, bits.bitwidth // 8)

    def codegen(context, builder, sig, args):
        # Bits of a mask stay an integer here. LLVM would turn them back into a mask, and pass it from block to block
        # lane by lane, because AVX2 has no registers for masks.
        word = args[0].type
        opaque = ir.InlineAsm(ir.FunctionType(word, [word]), "", "=r,0")
        return builder.bitcast(builder.call(opaque, args), _ir(target))

    return target(bits), codegen


@intrinsic
def from_bytes(typingctx, vector):
    """Undo `as_bytes`."""
    target = getattr(types, f"uint{8 * vector.lanes}")

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(target.bitwidth))

    return target(vector), codegen


@intrinsic
def bits_mask(typingctx, bits):
    """Undo `mask_bits`: a mask with one lane for each bit."""
    target = Vector(types.boolean, bits.bitwidth)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _ir(target))

    return target(bits), codegen


def _lanes(builder, value, first, count):
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(first, first + count)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), chosen)


def _halving(combine):
    @intrinsic
    def halving(typingctx, vector):
        """All lanes combined by halving: lane j with lane j + half, until one is left."""

        def codegen(context, builder, sig, args):
            value = args[0]
            while value.type.count > 1:
                half = value.type.count // 2
                low, high = (_lanes(builder, value, first, half) for first in (0, half))
                value = combine(builder, vector, low, high)
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return vector.element(vector), codegen

    return halving


largest_lane = _halving(lambda builder, vector, low, high: _chosen(builder, vector, ">", low, high))
smallest_lane = _halving(lambda builder, vector, low, high: _chosen(builder, vector, "<", low, high))
sum_lanes = _halving(lambda builder, vector, low, high: builder.fadd(low, high))
sum_integers = _halving(lambda builder, vector, low, high: builder.add(low, high))


@intrinsic
def first_lane(typingctx, vector):
    """Lane 0 as a scalar."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return vector.element(vector), codegen


@intrinsic
def popcount(typingctx, bits):
    """Number of bits that are 1 in an unsigned integer."""

    def codegen(context, builder, sig, args):
        count = builder.ctpop(args[0])
        return context.cast(builder, count, bits, types.int64)

    return types.int64(bits), codegen


@intrinsic
def trailing_zeros(typingctx, bits):
    """Position of the lowest bit that is 1, or the width of the integer if there is none."""

    def codegen(context, builder, sig, args):
        position = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return context.cast(builder, position, bits, types.int64)

    return types.int64(bits), codegen


def _rounding(name):
    @intrinsic
    def rounding(typingctx, vector):
        """An LLVM intrinsic on floats."""

        def codegen(context, builder, sig, args):
            kind = _ir(vector)
            signature = ir.FunctionType(kind, [kind])
            suffix = f"v{vector.lanes}f{vector.element.bitwidth}"
            function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
            return builder.call(function, args)

        return vector(vector), codegen

    return rounding


floor = _rounding("floor")
ceil = _rounding("ceil")
round_even = _rounding("rint")
sqrt = _rounding("sqrt")


@intrinsic
def convert_like(typingctx, vector, array):
    """`convert` to the element type of an array."""
    target = Vector(array.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        if target == vector:
            return args[0]
        return _conversion(builder, vector, target)(args[0], _ir(target))

    return target(vector, array), codegen
