"""Fusion groups: many small tensors are encoded, merged or decoded in one call.

A message holds, for each tensor, a mark (uint32: bytes of its payload, bit 31 if the sender used it, bit 30 if it was
not finite), and then the payloads, without gaps. `gradwire.sync.fusion` prepares the arguments.

The functions that encode and decode one tensor are arguments, as addresses of compiled code, so these loops are
compiled once for all compressors. They have the signatures of generated code; see `gradwire.lang.targets.numba`.

Tables have one row for each tensor. Addresses are those of contiguous arrays. `like` is an empty array with the element
type of the gradients.
"""
# Shapes: M = tensors, N = elements of one, W = messages

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, load_f32, store_f32
from gradwire.kernels.cpu.lanes import splat
from gradwire.kernels.cpu.sweep import advance
from gradwire.kernels.cpu.vector import array_at, f32, load, store, u8, u32

USED, NONFINITE, LENGTH = np.uint32(1 << 31), np.uint32(1 << 30), np.uint32((1 << 30) - 1)
MARK_BYTES = 4
INVALID = -1
"""Result if a message is damaged."""

_BYTES, _FLOATS, _DOUBLES = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 1, "C"), types.float64[::1]
_KEYS, _ADDRESSES, _SIZES = types.uint32[::1], types.uint64[::1], types.int64[::1]


@functools.cache
def _compiled(function: Any, arguments: tuple[Any, ...]) -> tuple[int, Any]:
    """Compile a kernel for these types; return its address, and the library that must live as long."""
    function.compile(arguments)
    compiled = function.overloads[arguments]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name), compiled.library


@functools.cache
def encoder(function: Any, dtype: np.dtype, feedback: bool) -> int:
    """Address of an `encode` of gradients with this element type (as `as_input` returns it), with residuals or not."""
    residual = _FLOATS if feedback else types.none
    more = types.none, _KEYS, types.int64, _DOUBLES, _BYTES
    return _compiled(function, (typeof(np.empty(0, dtype)), types.float32, residual, residual, _BYTES, *more))[0]


@functools.cache
def decoder(function: Any) -> int:
    """Address of a `decode_sum`."""
    return _compiled(function, (_ADDRESSES, _SIZES, _FLOATS, types.none, _KEYS, types.int64, _DOUBLES, _BYTES))[0]


def _call(result: Any) -> Any:
    """Return the code generator of a call of compiled code that returns `result`, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, packed = arguments
        values = cgutils.unpack_tuple(builder, packed)
        kind = ir.FunctionType(context.get_value_type(result), [value.type for value in values])
        return builder.call(builder.inttoptr(address, kind.as_pointer()), values)

    return codegen


@intrinsic
def _call_encode(typingctx, address, arguments):
    return types.int64(types.uint64, arguments), _call(types.int64)


@intrinsic
def _call_decode(typingctx, address, arguments):
    return types.boolean(types.uint64, arguments), _call(types.boolean)


@kernel
def _encode_one(encode, residual, row, grad, scale, residual_in, residual_out, keys, static, scratch, place):
    """Encode one tensor to an address; return its mark."""
    body = array_at(place, row[2], u8)
    before, after = array_at(residual_in, row[0], residual), array_at(residual_out, row[0], residual)
    length = _call_encode(encode, (grad, scale, before, after, body, None, keys, row[1], static, scratch))
    return USED | NONFINITE if length < 0 else USED | np.uint32(length)


@kernel
def encode_group(
    encode, like, residual, table, grads, scale, residuals_in, residuals_out, keys, static, scratch, message
):
    """Encode tensors into a message.

    Args:
        encode: Result of `encoder`.
        like: See the module.
        residual: Empty float32 array if there are residuals, else None.
        table: Number of elements, global index of the first one, and most bytes of a payload, int64[M, 3].
        grads: Addresses of the gradients, uint64[M]; 0 for a tensor that this rank has not used.
        scale: Factor of the gradients, float32.
        residuals_in: Addresses of the residuals, uint64[M].
        residuals_out: Addresses of the next residuals.
        keys: Keys of random numbers, uint32[M, 4].
        static: Static values, float64[M, S].
        scratch: Memory for `encode`.
        message: Space for M marks and the longest payloads.

    Returns:
        Number of bytes of the message.
    """
    num_tensors, place = table.shape[0], np.uint64(message.ctypes.data)
    marks, at = array_at(place, num_tensors, u32), MARK_BYTES * num_tensors
    for i in range(num_tensors):
        if grads[i] == 0:
            marks[i] = 0
            continue
        grad = array_at(grads[i], table[i, 0], like)
        marks[i] = _encode_one(
            *(encode, residual, table[i], grad, scale, residuals_in[i], residuals_out[i], keys[i], static[i]),
            *(scratch, place + np.uint64(at)),
        )
        at += np.int64(marks[i] & LENGTH)
    return at


@kernel
def advance_group(like, table, grads, scale, before, momentum, after):
    """Advance the velocities of tensors that this rank has used; see `reference.sweep.advance_velocity`.

    Args:
        before: Addresses of the velocities, uint64[M].
        momentum: Their factor, float32.
        after: Addresses of the next velocities.

    All other arguments are those of `encode_group`.
    """
    for i in range(table.shape[0]):
        if grads[i] != 0:
            count = table[i, 0]
            grad, velocity = array_at(grads[i], count, like), array_at(before[i], count, f32)
            advance(grad, scale, velocity, momentum, array_at(after[i], count, f32))


@kernel
def _payloads(i, most, messages, sizes, ends, bodies, lengths):
    """Collect the payloads of one tensor.

    Args:
        ends: Where the payloads of the next tensor begin in each message, int64[W]; moved on.
        bodies: Receives their addresses, uint64[W].
        lengths: Receives their bytes, int64[W].

    Returns:
        Number of payloads, and whether a sender's gradient was not finite. `INVALID` if a length is wrong.
    """
    count, nonfinite = 0, False
    for w in range(messages.size):
        mark = array_at(messages[w] + np.uint64(MARK_BYTES * i), 1, u32)[0]
        length = np.int64(mark & LENGTH)
        if length > most or ends[w] + length > sizes[w] or (mark & USED == 0 and mark != 0):
            return INVALID, False
        if mark & NONFINITE:
            if length != 0:
                return INVALID, False
            nonfinite = True
        if mark & USED:
            bodies[count], lengths[count] = messages[w] + np.uint64(ends[w]), length
            count += 1
        ends[w] += length
    return count, nonfinite


@kernel
def _starts(num_tensors, sizes, ends):
    """Begin to read messages; return whether each has its marks."""
    for w in range(sizes.size):
        ends[w] = MARK_BYTES * num_tensors
        if sizes[w] < ends[w]:
            return False
    return True


@kernel
def merge_group(
    encode, decode_sum, like, residual, table, grads, scale, residuals_in, residuals_out, keys, static, scratch,
    total, messages, sizes, message,
):  # fmt: skip
    """Decode the payloads of several messages, add them and this rank's gradients, and encode the sums.

    Args:
        encode: Result of `encoder` for float32.
        decode_sum: Result of `decoder`.
        total: Space for the elements of the largest tensor, float32.
        messages: Addresses of the messages, uint64[W].
        sizes: Their bytes, int64[W].

    All other arguments and the result are those of `encode_group`; `INVALID` if a message is damaged.
    """
    num_tensors, place = table.shape[0], np.uint64(message.ctypes.data)
    marks, at = array_at(place, num_tensors, u32), MARK_BYTES * num_tensors
    bodies, lengths = np.empty(messages.size, np.uint64), np.empty(messages.size, np.int64)
    ends = np.empty(messages.size, np.int64)
    if not _starts(num_tensors, sizes, ends):
        return INVALID
    for i in range(num_tensors):
        count, nonfinite = _payloads(i, table[i, 2], messages, sizes, ends, bodies, lengths)
        if count < 0:
            return INVALID
        if nonfinite:
            marks[i] = USED | NONFINITE
            continue
        if count == 0 and grads[i] == 0:
            marks[i] = 0
            continue
        out = total[: table[i, 0]]
        arguments = bodies[:count], lengths[:count], out, None, keys[i], table[i, 1], static[i], scratch
        if not _call_decode(decode_sum, arguments):
            return INVALID
        if grads[i] != 0:
            grad = array_at(grads[i], table[i, 0], like)
            for start in range(0, out.size, LANES):
                store(out, start, load_f32(grad, start, LANES) * scale + load(out, start, LANES))
        marks[i] = _encode_one(
            *(encode, residual, table[i], out, np.float32(1), residuals_in[i], residuals_out[i], keys[i], static[i]),
            *(scratch, place + np.uint64(at)),
        )
        at += np.int64(marks[i] & LENGTH)
    return at if (sizes == ends).all() else INVALID


@kernel
def decode_group(decode_sum, like, table, outs, keys, static, scratch, total, messages, sizes):
    """Write the sums of the payloads of several messages to tensors; zeros where nobody has used a tensor.

    Args:
        outs: Addresses of the tensors, uint64[M].
        total: Space for the elements of the largest tensor, float32; empty if the tensors are float32 themselves.

    All other arguments are those of `merge_group`.

    Returns:
        0, or 1 if a sender's gradient was not finite, or `INVALID`.
    """
    num_tensors, any_nonfinite = table.shape[0], 0
    bodies, lengths = np.empty(messages.size, np.uint64), np.empty(messages.size, np.int64)
    ends = np.empty(messages.size, np.int64)
    if not _starts(num_tensors, sizes, ends):
        return INVALID
    for i in range(num_tensors):
        out = array_at(outs[i], table[i, 0], like)
        count, nonfinite = _payloads(i, table[i, 2], messages, sizes, ends, bodies, lengths)
        if count < 0:
            return INVALID
        if nonfinite or count == 0:
            any_nonfinite |= nonfinite
            fill = splat(np.float32(np.nan if nonfinite else 0), LANES)
            for start in range(0, out.size, LANES):
                store_f32(out, start, fill)
            continue
        sums = array_at(outs[i] if total.size == 0 else np.uint64(total.ctypes.data), table[i, 0], f32)
        arguments = bodies[:count], lengths[:count], sums, None, keys[i], table[i, 1], static[i], scratch
        if not _call_decode(decode_sum, arguments):
            return INVALID
        if total.size > 0:
            for start in range(0, out.size, LANES):
                store_f32(out, start, load(sums, start, LANES))
    return any_nonfinite if (sizes == ends).all() else INVALID
