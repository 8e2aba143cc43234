"""The oracle: a program evaluated node by node with NumPy, nothing fused.

Generated code must produce the same bytes, the same residual and the same tensor, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradwire.kernels.layout import TERNARY_DIGITS, ceil_div
from gradwire.kernels.reference.bits import pack_bits, unpack_bits
from gradwire.kernels.reference.elements import as_float32
from gradwire.kernels.reference.positions import pack_positions, positions_bytes, unpack_positions
from gradwire.kernels.reference.sweep import cast as cast_kernel
from gradwire.lang.ir import Field, Node, Program
from gradwire.lang.operators.arithmetic import evaluate_static, narrowed
from gradwire.lang.operators.base import coding_of, lookup
from gradwire.lang.types import ElementType

_LARGEST = np.finfo(np.float32).max


@dataclass
class Environment:
    """What a program knows apart from its inputs."""

    size: int
    shared_key: int = 0
    private_key: int = 0
    offset: int = 0
    step: int = 0
    previous_state: float = 0.0
    gradient: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    fields: Mapping[str, Any] = field(default_factory=dict)


def encode(
    program: Program, x: np.ndarray, env: Environment, scale: float = 1.0, residual: np.ndarray | None = None,
    stats: Sequence[np.ndarray] = (),
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Encode scale · x + residual.

    Returns:
        The body of the payload, and the residual; None if the gradient is not finite.
    """
    with np.errstate(all="ignore"):
        gradient = as_float32(x) * np.float32(scale)
        if residual is not None:
            gradient = gradient + residual
    if not np.isfinite(gradient).all() or not all(np.isfinite(each).all() for each in stats):
        return None
    env.gradient = gradient
    known: dict[int, Any] = {}
    if stats:
        known = {id(node): float(each[0]) for node, each in zip(program.stats, stats)}
    values = _evaluate(program.encode_nodes(), env, known)
    parts, env.fields = [], {}
    for each in program.fields:
        value = _as_sent(values[id(each.node)], each)
        env.fields[each.name] = value
        if not (stats and is_stat(program, each)):
            parts.append(_sent(value, each, env.size))
    if program.items is not None:
        length = next(np.size(env.fields[each.name]) for each in program.fields if each.node.space == program.items)
        scalars = sum(not each.is_array and not (stats and is_stat(program, each)) for each in program.fields)
        parts.insert(scalars, np.array([length], "<u4").view(np.uint8))
    sent = _decoded(program, env)
    with np.errstate(all="ignore"):
        rest = gradient - sent
    return np.concatenate([np.empty(0, np.uint8), *parts]), rest


def statistics(program: Program, x: np.ndarray, env: Environment, scale: float = 1.0) -> list[np.float32]:
    """The rank's own values for the preliminary round; infinite if the gradient is not finite."""
    with np.errstate(all="ignore"):
        env.gradient = as_float32(x) * np.float32(scale)
    if not np.isfinite(env.gradient).all():
        return [np.float32(np.inf)] * len(program.stats)
    values = _evaluate(program.encode_nodes(), env, {})
    return [narrowed(values[id(node.inputs[0])]) for node in program.stats]


def decode(program: Program, body: np.ndarray, env: Environment, stats: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Decode a body that `encode` wrote."""
    env.fields, at, length = {}, 0, -1
    for each in program.fields:
        if program.items is not None and each.is_array and length < 0:
            length, at = int(body[at : at + 4].view("<u4")[0]), at + 4
        if stats and is_stat(program, each):
            position = [id(node) for node in program.stats].index(id(each.node.inputs[0]))
            env.fields[each.name] = np.float32(stats[position][0])
            continue
        count = num_values(each, env.size, length)
        if each.is_positions:
            positions = np.empty(count, np.uint32)
            is_valid = unpack_positions(body[at:], env.size, positions)
            assert is_valid, f"{each.name} is not a list of {count} positions"
            env.fields[each.name] = positions
            continue
        packed_bytes = each.dtype.num_bytes(count)
        part = body[at : at + packed_bytes] if each.coding is None else coding_of(each).expand(body[at:], packed_bytes)
        assert part is not None, f"{each.name} does not expand to {packed_bytes} bytes"
        env.fields[each.name] = _unpacked(part, each, count)
        at += packed_bytes
    return _decoded(program, env)


def is_stat(program: Program, each: Field) -> bool:
    """Whether a field is a value of the preliminary round, which need not be sent after it."""
    return each.node.op == "narrow" and any(each.node.inputs[0] is node for node in program.stats)


def num_values(each: Field, size: int, length: int) -> int:
    """Number of values in a field, for a tensor of `size` elements and a list of `length` items."""
    space = each.node.space
    if space.kind == "blocks":
        return ceil_div(size, space.block)
    return {"elements": size, "items": length}.get(space.kind, 1)


def num_bytes(each: Field, size: int, length: int) -> int:
    """Maximum bytes of a field."""
    if each.is_positions:
        return positions_bytes(size, length)
    return each.dtype.num_bytes(num_values(each, size, length))


def _evaluate(nodes: Sequence[Node], env: Environment, known: dict[int, Any]) -> dict[int, Any]:
    values = dict(known)
    for node in nodes:
        if id(node) in values:
            continue
        if node.space.kind == "static":
            values[id(node)] = float(evaluate_static(node, env.size, env.step, env.previous_state))
            continue
        inputs = [_aligned(values[id(each)], each, node, env.size) for each in node.inputs]
        values[id(node)] = _rounded(lookup(node.op).reference(node, inputs, env), node)
    return values


def _aligned(value: Any, source: Node, node: Node, size: int) -> Any:
    """An input of arithmetic with elements: float32, with block values repeated for their elements."""
    if lookup(node.op).is_collective or node.space.kind not in ("elements", "items", "blocks"):
        return value
    if source.space.kind == "blocks" and node.space.kind == "elements":
        return np.repeat(np.asarray(value, np.float32), source.space.block)[:size]
    if source.space.kind in ("static", "scalar"):
        return np.float32(value)
    return value


def _rounded(value: Any, node: Node) -> Any:
    if node.space.kind == "scalar":
        return float(value) if node.dtype != "bool" else bool(value)
    if node.space.kind == "blocks":
        return np.array([narrowed(each) for each in np.atleast_1d(value)], np.float32)
    return value


def _decoded(program: Program, env: Environment) -> np.ndarray:
    value = _evaluate(program.decode_nodes(), env, {})[id(program.output)]
    with np.errstate(all="ignore"):
        out = np.broadcast_to(np.asarray(value, np.float32), (env.size,))
        out = np.where(np.isnan(out), np.float32(0), out)
        return np.clip(out, -_LARGEST, _LARGEST).astype(np.float32)


def _as_sent(value: Any, each: Field) -> Any:
    if not each.is_array:
        return np.float32(value)
    return np.asarray(value, np.uint32 if each.node.op == "index" else np.float32)


def _sent(value: Any, each: Field, size: int) -> np.ndarray:
    """The bytes of a field."""
    if each.is_positions:
        out = np.empty(positions_bytes(size, value.size), np.uint8)
        pack_positions(value, size, out)
        return out
    packed = _packed(value, each)
    return packed if each.coding is None else coding_of(each).shorten(packed)


def _packed(value: Any, each: Field) -> np.ndarray:
    dtype = each.dtype
    values = np.atleast_1d(value)
    if dtype.packing == "raw":
        raw = np.empty(values.size, dtype.storage)
        if dtype.is_integer:
            raw[:] = values.astype(np.int64)
        else:
            cast_kernel(values, raw)
        return raw.view(np.uint8)
    parts = [_pack_chunk(values[s : s + dtype.chunk], dtype) for s in range(0, values.size, dtype.chunk)]
    return np.concatenate([np.empty(0, np.uint8), *parts])


def _pack_chunk(values: np.ndarray, dtype: ElementType) -> np.ndarray:
    levels = values.astype(np.int64)
    if dtype.packing == "bits":
        return np.packbits(levels.astype(bool), bitorder="little")
    out = np.zeros(ceil_div(values.size, dtype.per_byte), np.uint8)
    if dtype.packing == "planes":
        pack_bits(levels.astype(np.uint8), int(dtype.bits), out)
        return out
    digits = np.ones(TERNARY_DIGITS * out.size, np.int64)
    digits[: levels.size] = levels + 1
    packed: np.ndarray = digits.reshape(TERNARY_DIGITS, out.size).T @ np.array([81, 27, 9, 3, 1])
    return packed.astype(np.uint8)


def _unpacked(body: np.ndarray, each: Field, count: int) -> Any:
    dtype = each.dtype
    if dtype.packing == "raw":
        raw = body.view(dtype.storage)
        values = raw if each.node.op == "index" else as_float32(raw) if not dtype.is_integer else raw.astype(np.float32)
        return values if each.is_array else np.float32(values[0])
    parts, at = [np.empty(0, np.float32)], 0
    for start in range(0, count, dtype.chunk):
        length = min(dtype.chunk, count - start)
        num_bytes = ceil_div(length, dtype.per_byte)
        parts.append(_unpack_chunk(body[at : at + num_bytes], dtype, length))
        at += num_bytes
    return np.concatenate(parts)


def _unpack_chunk(body: np.ndarray, dtype: ElementType, count: int) -> np.ndarray:
    if dtype.packing == "bits":
        return np.unpackbits(body, count=count, bitorder="little").astype(np.float32)
    if dtype.packing == "planes":
        levels = np.empty(count, np.uint8)
        unpack_bits(body, int(dtype.bits), levels)
        return levels.astype(np.float32)
    digits = [body.astype(np.int64) // power % 3 for power in (81, 27, 9, 3, 1)]
    return (np.concatenate(digits)[:count] - 1).astype(np.float32)
