"""Short vectors as values in Numba: `load` 64 floats, compute with them, `store` them.

Numba leaves vectorization to LLVM, which gives up on the loops that matter here: an output that may overlap an input, a
sum in a fixed order, bits that come from comparisons. With these types a loop is vector code as written, for any
target: LLVM splits each vector into the registers of the machine.

`load` and `store` never leave their array: past its end a load yields zeros and a store writes nothing. Kernels
therefore need one loop and no tail. Operators work lane by lane on equal types, or on a vector and a scalar, which is
converted to the element type. Comparisons with NaN are false, except `!=`. Integers wrap.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

f32, f64 = types.float32, types.float64
i8, i16, i32, i64 = types.int8, types.int16, types.int32, types.int64
u8, u16, u32, u64 = types.uint8, types.uint16, types.uint32, types.uint64


# How far ahead loads prefetch. Measured with hardware prefetch alone: sign packing reached a third of the speed of a
# copy, because small stores hide the stream of loads; planar layouts, which read several streams, reached half.
_PREFETCH_BYTES = 4096
_LINE_BYTES = 64


class Vector(types.Type):
    """A fixed number of lanes of one scalar type; `types.boolean` for the result of a comparison."""

    def __init__(self, element, lanes):
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"Vector({element}, {lanes})")


def _element_ir(element):
    if element == types.boolean:
        return ir.IntType(1)
    if isinstance(element, types.Float):
        return ir.FloatType() if element == f32 else ir.DoubleType()
    return ir.IntType(element.bitwidth)


def _ir(vector):
    return ir.VectorType(_element_ir(vector.element), vector.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _ir(fe_type))


def _is_float(vector):
    return isinstance(vector.element, types.Float)


def _is_signed(vector):
    return isinstance(vector.element, types.Integer) and vector.element.signed


def _broadcast(builder, scalar, vector_ir):
    undefined = ir.Constant(vector_ir, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector_ir.count), None)
    return builder.shuffle_vector(first, undefined, zeros)


# --- operators ----------------------------------------------------------------------------------------------

_COMPARISONS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}


def _arithmetic(builder, op, vector, a, b):
    if _is_float(vector):
        table = {operator.add: builder.fadd, operator.sub: builder.fsub, operator.mul: builder.fmul}
        table |= {operator.truediv: builder.fdiv}
    else:
        shift = builder.ashr if _is_signed(vector) else builder.lshr
        table = {operator.add: builder.add, operator.sub: builder.sub, operator.mul: builder.mul}
        table |= {operator.and_: builder.and_, operator.or_: builder.or_, operator.xor: builder.xor}
        table |= {operator.lshift: builder.shl, operator.rshift: shift}
    return table[op](a, b)


def _compare(builder, op, vector, a, b):
    sign = _COMPARISONS[op]
    if _is_float(vector):
        return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, a, b)
    return (builder.icmp_signed if _is_signed(vector) else builder.icmp_unsigned)(sign, a, b)


def _register(op):
    comparison = op in _COMPARISONS

    @infer_global(op)
    class _Operator(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) != 2 or not isinstance(args[0], Vector):
                return None
            a, b = args[0], types.unliteral(args[1])
            if a != b and not isinstance(b, types.Number):
                return None
            return signature(Vector(types.boolean, a.lanes) if comparison else a, a, b)

    emit = _compare if comparison else _arithmetic

    @lower_builtin(op, Vector, Vector)
    def lower_vectors(context, builder, sig, args):
        return emit(builder, op, sig.args[0], *args)

    @lower_builtin(op, Vector, types.Number)
    def lower_scalar(context, builder, sig, args):
        vector, number = sig.args
        scalar = context.cast(builder, args[1], number, vector.element)
        return emit(builder, op, vector, args[0], _broadcast(builder, scalar, _ir(vector)))


for _op in (*_COMPARISONS, operator.add, operator.sub, operator.mul, operator.truediv):
    _register(_op)
for _op in (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift):
    _register(_op)


# --- memory -------------------------------------------------------------------------------------------------


def _place(context, builder, array, value, index, index_type):
    """Pointer to array[index], and the number of elements from there to the end."""
    if array.layout != "C" or array.ndim != 1:
        raise TypingError("Expected a contiguous one-dimensional array.")
    struct = context.make_array(array)(context, builder, value)
    index = context.cast(builder, index, index_type, types.intp)
    return builder.gep(struct.data, [index]), builder.sub(struct.nitems, index)


def _cut(builder, count, lanes):
    """`count` clamped to [0, lanes]."""
    zero = ir.Constant(count.type, 0)
    positive = builder.select(builder.icmp_signed("<", count, zero), zero, count)
    most = ir.Constant(count.type, lanes)
    return builder.select(builder.icmp_signed("<", positive, most), positive, most)


def _prefetch(builder, pointer, num_bytes):
    """Prefetch the lines that a sweep reads next. Past the end of the array this has no effect.

    A load of less than a line prefetches nothing: it may not be part of a sweep.
    """
    byte, word = ir.IntType(8), ir.IntType(32)
    start = builder.bitcast(pointer, byte.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [start.type, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [start.type], kind)
    for line in range(0, num_bytes - _LINE_BYTES + 1, _LINE_BYTES):
        ahead = builder.gep(start, [word(_PREFETCH_BYTES + line)])
        builder.call(function, [ahead, word(0), word(3), word(1)])  # to read, into all caches, data


def emit_load(context, builder, array, value, index, index_type, lanes):
    """Emit `load`, also for intrinsics that convert what they load."""
    kind = ir.VectorType(_element_ir(array.dtype), lanes)
    size = array.dtype.bitwidth // 8
    pointer, count = _place(context, builder, array, value, index, index_type)
    _prefetch(builder, pointer, lanes * size)
    scratch = cgutils.alloca_once(builder, kind)
    full = builder.icmp_signed(">=", count, ir.Constant(count.type, lanes))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            whole = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=size)
            after_whole = builder.block
        with otherwise:
            builder.store(ir.Constant(kind, None), scratch)
            cgutils.raw_memcpy(builder, scratch, pointer, _cut(builder, count, lanes), size)
            part = builder.load(scratch)
            after_part = builder.block
    result = builder.phi(kind)
    result.add_incoming(whole, after_whole)
    result.add_incoming(part, after_part)
    return result


def emit_store(context, builder, array, value, index, index_type, lanes, end=None):
    """Emit `store`: `lanes` is the IR value of the vector, `end` an IR intp that limits what is written."""
    size = array.dtype.bitwidth // 8
    pointer, count = _place(context, builder, array, value, index, index_type)
    if end is not None:
        before_end = builder.sub(end, context.cast(builder, index, index_type, types.intp))
        count = builder.select(builder.icmp_signed("<", before_end, count), before_end, count)
    kind = lanes.type
    scratch = cgutils.alloca_once(builder, kind)
    full = builder.icmp_signed(">=", count, ir.Constant(count.type, kind.count))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            builder.store(lanes, builder.bitcast(pointer, kind.as_pointer()), align=size)
        with otherwise:
            builder.store(lanes, scratch)
            cgutils.raw_memcpy(builder, pointer, scratch, _cut(builder, count, kind.count), size)


@intrinsic(prefer_literal=True)
def load(typingctx, array, index, lanes):
    """`lanes` elements from `index` on; zeros past the end."""

    def codegen(context, builder, sig, args):
        return emit_load(context, builder, array, args[0], args[1], sig.args[1], lanes.literal_value)

    return Vector(array.dtype, lanes.literal_value)(array, index, lanes), codegen


def _expect_vector(array, vector):
    """Raise an error unless the type of a value is that of a vector of the array's elements."""
    if not isinstance(vector, Vector) or array.dtype != vector.element:
        raise TypingError(f"Expected a vector of {array.dtype}, got {vector}.")


@intrinsic
def store(typingctx, array, index, vector):
    """Write the lanes that lie inside the array. The element types must be equal."""
    _expect_vector(array, vector)

    def codegen(context, builder, sig, args):
        emit_store(context, builder, array, args[0], args[1], sig.args[1], args[2])
        return context.get_dummy_value()

    return types.void(array, index, vector), codegen


@intrinsic
def store_until(typingctx, array, index, end, vector):
    """Write the lanes that lie inside the array and before the element `end`."""
    _expect_vector(array, vector)

    def codegen(context, builder, sig, args):
        limit = context.cast(builder, args[2], sig.args[2], types.intp)
        emit_store(context, builder, array, args[0], args[1], sig.args[1], args[3], limit)
        return context.get_dummy_value()

    return types.void(array, index, end, vector), codegen


@intrinsic(prefer_literal=True)
def load_inside(typingctx, array, index, lanes):
    """`load` for an array in the cache, without prefetch, if all lanes lie inside it. Nothing checks this."""
    kind = ir.VectorType(_element_ir(array.dtype), lanes.literal_value)

    def codegen(context, builder, sig, args):
        pointer, _ = _place(context, builder, array, args[0], args[1], sig.args[1])
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=array.dtype.bitwidth // 8)

    return Vector(array.dtype, lanes.literal_value)(array, index, lanes), codegen


@intrinsic
def store_inside(typingctx, array, index, vector):
    """`store` if all lanes lie inside the array. Nothing checks this."""
    _expect_vector(array, vector)

    def codegen(context, builder, sig, args):
        pointer, _ = _place(context, builder, array, args[0], args[1], sig.args[1])
        place = builder.bitcast(pointer, _ir(vector).as_pointer())
        builder.store(args[2], place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, vector), codegen


def _array_at(context, builder, array, item, address, count):
    """IR of a contiguous array over foreign memory."""
    data = builder.inttoptr(address, context.get_data_type(item).as_pointer())
    size = context.get_constant(types.intp, item.bitwidth // 8)
    result = context.make_array(array)(context, builder)
    context.populate_array(
        result,
        data=data,
        shape=cgutils.pack_array(builder, [count]),
        strides=cgutils.pack_array(builder, [size]),
        itemsize=size,
        meminfo=None,
    )
    return result._getvalue()


@intrinsic
def array_at(typingctx, address, size, dtype):
    """The array of `size` elements at an integer address, for lists of arrays that are passed as addresses.

    `dtype` is a number type, or an array of that type. For None, the result is None.
    """
    if isinstance(dtype, types.NoneType):
        return types.none(types.uint64, size, dtype), lambda context, *_: context.get_dummy_value()
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context, builder, sig, args):
        count = context.cast(builder, args[1], sig.args[1], types.intp)
        return _array_at(context, builder, array, dtype.dtype, args[0], count)

    return array(types.uint64, size, dtype), codegen
