"""What can be done to a `Vector` beyond operators: convert, reinterpret, choose, rearrange, reduce."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from gradwire.kernels.cpu.vector import Vector, _broadcast, _ir, _is_float, _is_signed


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
    """The same values as another element type: widened by sign, truncated, or rounded to nearest even.

    A float to an integer truncates towards zero and must be in range.
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
    """A where the mask is true, else b; not arithmetic, so a NaN on the other side does not matter."""
    if a != b:
        raise TypingError(f"Expected two vectors of one type, got {a} and {b}.")

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    return a(mask, a, b), codegen


def _extreme(largest):
    @intrinsic
    def extreme(typingctx, a, b):
        """Lane by lane, of integers or of floats; of a float NaN in `a` the result is b."""
        if a != b:
            raise TypingError(f"Expected two vectors of one type, got {a} and {b}.")

        def codegen(context, builder, sig, args):
            compare = (
                builder.fcmp_ordered
                if _is_float(a)
                else builder.icmp_signed
                if _is_signed(a)
                else builder.icmp_unsigned
            )
            return builder.select(compare(">" if largest else "<", *args), *args)

        return a(a, b), codegen

    return extreme


maximum = _extreme(largest=True)
minimum = _extreme(largest=False)


@intrinsic(prefer_literal=True)
def lanes_below(typingctx, count, lanes):
    """A mask of the first `count` lanes."""
    width = lanes.literal_value

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(ir.IntType(64), width)
        wide = context.cast(builder, args[0], sig.args[0], types.int64)
        numbers = ir.Constant(kind, list(range(width)))
        return builder.icmp_signed("<", numbers, _broadcast(builder, wide, kind))

    return Vector(types.boolean, width)(types.int64, lanes), codegen


@intrinsic
def mask_bits(typingctx, mask):
    """The lanes of a mask as the bits of an unsigned integer, lane 0 the least significant."""
    target = getattr(types, f"uint{mask.lanes}")

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(mask.lanes))

    return target(mask), codegen


@intrinsic
def as_bytes(typingctx, bits):
    """The bytes of an unsigned integer, least significant first."""
    target = Vector(types.uint8, bits.bitwidth // 8)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _ir(target))

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
    """Undo `mask_bits`: as many lanes as the integer has bits."""
    target = Vector(types.boolean, bits.bitwidth)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _ir(target))

    return target(bits), codegen


@intrinsic(prefer_literal=True)
def part(typingctx, vector, first, lanes):
    """`lanes` neighbouring lanes from the constant `first` on."""
    start, count = first.literal_value, lanes.literal_value
    target = Vector(vector.element, count)

    def codegen(context, builder, sig, args):
        chosen = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
        return builder.shuffle_vector(args[0], ir.Constant(_ir(vector), ir.Undefined), chosen)

    return target(vector, first, lanes), codegen


@intrinsic
def join(typingctx, a, b):
    """The lanes of a, then those of b."""
    target = Vector(a.element, 2 * a.lanes)

    def codegen(context, builder, sig, args):
        order = ir.Constant(ir.VectorType(ir.IntType(32), target.lanes), list(range(target.lanes)))
        return builder.shuffle_vector(args[0], args[1], order)

    return target(a, b), codegen


@intrinsic
def first_lane(typingctx, vector):
    """Lane 0 as a scalar."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return vector.element(vector), codegen


@intrinsic
def popcount(typingctx, bits):
    """How many bits of an unsigned integer are 1."""

    def codegen(context, builder, sig, args):
        count = builder.ctpop(args[0])
        return context.cast(builder, count, bits, types.int64)

    return types.int64(bits), codegen


@intrinsic
def trailing_zeros(typingctx, bits):
    """Position of the lowest bit that is 1, in an integer that is not 0."""

    def codegen(context, builder, sig, args):
        position = builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))
        return context.cast(builder, position, bits, types.int64)

    return types.int64(bits), codegen


def _rounding(name):
    @intrinsic
    def rounding(typingctx, vector):
        """Floats to integral floats."""

        def codegen(context, builder, sig, args):
            kind = _ir(vector)
            signature = ir.FunctionType(kind, [kind])
            suffix = f"v{vector.lanes}f{vector.element.bitwidth}"
            function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
            return builder.call(function, args)

        return vector(vector), codegen

    return rounding


floor = _rounding("floor")
round_even = _rounding("rint")


@intrinsic
def convert_like(typingctx, vector, array):
    """`convert` to the element type of an array."""
    target = Vector(array.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        if target == vector:
            return args[0]
        return _conversion(builder, vector, target)(args[0], _ir(target))

    return target(vector, array), codegen
