"""Torch functions called by generated Triton code: launches, scalars, lists, and bytes of payloads.

Scalars are float64 tensors on the gradient's device, with one value (in decoders, one per rank). Functions that
synchronize with the device say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradwire.kernels.gpu import device, packing
from gradwire.kernels.layout import MAX_RUN, NUM_QUARTIC, ZERO_BYTE, ceil_div
from gradwire.kernels.reference import hashing
from gradwire.lang.operators.random import stream_key
from gradwire.lang.operators.sample import SAMPLE_STREAM

LARGEST = torch.finfo(torch.float32).max
Number = torch.Tensor | float


def launch(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    """Launch a kernel on the device of its tensors, without contraction to FMA. An empty grid launches nothing."""
    if 0 in grid:
        return
    tensor = next(each for each in args if isinstance(each, torch.Tensor))
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        kernel[grid](*args, enable_fp_fusion=False)


def chunks(count: int, chunk: int = 1024) -> int:
    """Number of programs of a sweep."""
    return ceil_div(count, chunk)


def as_elements(grad: torch.Tensor) -> torch.Tensor:
    """A flat view of a gradient; bfloat16 as int16 bits."""
    flat = grad.detach().reshape(-1).contiguous()
    return flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat


def flag(like: torch.Tensor) -> torch.Tensor:
    """A flag for kernels to set."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def empty(shape: int | tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Uninitialized memory on the same device."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def key_words(keys: Sequence[int], shared: bool, stream: int) -> tuple[int, int]:
    """The words of the key of a stream, as signed integers."""
    return _words(stream_key(_key(keys, shared), stream))


def sample_words(keys: Sequence[int]) -> tuple[int, int]:
    """The words of the key for samples, as signed integers."""
    return _words(_key(keys, False) ^ (SAMPLE_STREAM << 32))


def _key(keys: Sequence[int], shared: bool) -> int:
    low, high = keys[:2] if shared else keys[2:]
    return int(low) | int(high) << 32


def _words(key: int) -> tuple[int, int]:
    words = key & 0xFFFFFFFF, key >> 32
    return (words[0] ^ 1 << 31) - (1 << 31), (words[1] ^ 1 << 31) - (1 << 31)


# -- scalars -------------------------------------------------------------------------------------------------


def narrow(value: torch.Tensor) -> torch.Tensor:
    """Round to finite float32, returned as float64; NaN becomes 0."""
    finite = torch.nan_to_num(value, nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)
    return finite.to(torch.float32).to(torch.float64)


def narrowed(value: torch.Tensor) -> torch.Tensor:
    """`narrow`, returned as float32, for block values."""
    return narrow(value).to(torch.float32)


def divide(a: Number, b: Number) -> torch.Tensor:
    """A quotient, rounded once. With a Python number, torch would multiply by the reciprocal instead."""
    a, b = _tensors(a, b)
    return torch.div(a, b)


def choose(condition: Number, a: Number, b: Number) -> torch.Tensor:
    """`a` where the condition holds, else `b`; float64. At least one of the three is a tensor."""
    device = next(each.device for each in (condition, a, b) if isinstance(each, torch.Tensor))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.where(torch.as_tensor(condition, device=device) != 0, zero + a, zero + b)


def _tensors(a: Number, b: Number) -> tuple[torch.Tensor, torch.Tensor]:
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor), "static numbers are computed before, exactly"
    made = [
        each if isinstance(each, torch.Tensor) else torch.full((), each, dtype=torch.float64, device=like.device)
        for each in (a, b)
    ]
    return made[0], made[1]


def as_scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A Python number as a scalar on the device."""
    return torch.full((), value, dtype=torch.float64, device=like.device)


# -- reductions of one value per chunk, along the last axis --------------------------------------------------


def finish_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum in canonical order: 1,024 values at a time, until one is left."""
    if parts.shape[-1] == 0 or parts.numel() == 0:
        return torch.zeros(parts.shape[:-1], dtype=torch.float64, device=parts.device)
    rows = parts.reshape(-1, parts.shape[-1])
    while rows.shape[1] > 1:
        out = empty((rows.shape[0], chunks(rows.shape[1])), torch.float64, parts)
        launch(device.sum_rows, tuple(out.shape), rows, rows.shape[1], out)
        rows = out
    return rows.reshape(parts.shape[:-1])


def finish_count(parts: torch.Tensor) -> torch.Tensor:
    """Total count."""
    return parts.sum(dim=-1).to(torch.float64)


def finish_mean(parts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean; 0 of no elements."""
    return divide(finish_sum(parts), finish_count(counts).clamp(min=1.0))


def finish_norm(parts: torch.Tensor) -> torch.Tensor:
    """Square root of a sum of squares."""
    return torch.sqrt(finish_sum(parts))


def finish_min(parts: torch.Tensor) -> torch.Tensor:
    """The smallest value; 0 if there is none. NaN marks chunks without values. Never -0."""
    return -finish_max(-parts) + 0.0


def finish_max(parts: torch.Tensor) -> torch.Tensor:
    """The largest value; 0 if there is none. NaN marks chunks without values. Never -0."""
    if parts.shape[-1] == 0:
        return torch.zeros(parts.shape[:-1], dtype=torch.float64, device=parts.device)
    is_none = parts.isnan()
    largest = torch.where(is_none, -torch.inf, parts).amax(dim=-1).to(torch.float64)
    return torch.where(is_none.all(dim=-1), 0.0, largest) + 0.0


# -- lists ---------------------------------------------------------------------------------------------------


def places(counts: torch.Tensor, most: float) -> tuple[torch.Tensor, int]:
    """The start of each chunk's items in the list, and the length of the list. Synchronizes with the device."""
    ends = torch.cumsum(counts, dim=0, dtype=torch.int64)
    total = int(ends[-1]) if ends.numel() else 0
    return ends - counts, min(total, max(int(most), 0))


def keep_top(index: torch.Tensor, value: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The `most` largest magnitudes of a list, in order; ties go to the first."""
    if value.numel() <= most:
        return index, value
    order = torch.sort(value.abs(), descending=True, stable=True).indices
    chosen = order[: max(int(most), 0)].sort().values
    return index[chosen], value[chosen]


_EMPTY = -(2**63)  # an empty slot


def hash_table(slots: int, like: torch.Tensor) -> torch.Tensor:
    """A table of empty slots."""
    return torch.full((slots,), _EMPTY, dtype=torch.int64, device=like.device)


def hash_numbers(keys: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The numbers of the hash function drawn from the private key, int64[2]."""
    words = np.array(hashing.hash_numbers(_key(keys, False)), np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(like.device)


def hashed_list(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and values in a table of `store_hashed`, by position. Synchronizes with the device."""
    entries = table[table > _EMPTY + 1]
    index, order = torch.sort(0xFFFFFFFF - ((entries >> 1) & 0xFFFFFFFF))
    entries = entries[order]
    bits = ((entries >> 33) + 0x40000000) | ((entries & 1) << 31)
    return index.to(torch.int32), bits.to(torch.int32).view(torch.float32)


def sort_floats(values: torch.Tensor, descending: bool) -> torch.Tensor:
    """Sort; -0 comes before +0."""
    bits = values.view(torch.int32)
    keys = torch.sort(bits ^ ((bits >> 31) & 0x7FFFFFFF), descending=descending).values
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def item(values: torch.Tensor, position: Number) -> torch.Tensor:
    """The item at a position, which is clamped to the list; 0 if the list is empty."""
    if values.numel() == 0:
        return as_scalar(0.0, values)
    last = values.numel() - 1
    if not isinstance(position, torch.Tensor):
        return values[int(min(max(position, 0.0), last))].to(torch.float64)
    at = torch.nan_to_num(position, nan=0.0).clamp(0, last).to(torch.int64)
    return values.index_select(0, at.reshape(1))[0].to(torch.float64)


# -- payloads ------------------------------------------------------------------------------------------------


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of an array."""
    return values.contiguous().view(torch.uint8)


def scalar_bytes(*values: torch.Tensor) -> torch.Tensor:
    """The bytes of scalars, as float32. There are none if the preliminary round has shared all of them."""
    if not values:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.stack(values).to(torch.float32).view(torch.uint8)


def pack_rest(tail: torch.Tensor, out: torch.Tensor, count: int, per: int, chunk: int) -> None:
    """Pack the partial chunk at the end of `count` elements, if there is one."""
    length = count % chunk
    if length:
        is_trit = chunk > 1024
        size = ceil_div(length, per)
        launch(
            packing.pack_tail, (1,), tail, out[-size:], length, size, per, 3 if is_trit else 2 ** (8 // per), is_trit
        )


def stacked(bodies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bodies of equal length as rows, uint8[W, bytes], aligned so that any dtype can be read."""
    if len(bodies) == 1 and bodies[0].storage_offset() % 8 == 0 and bodies[0].is_contiguous():
        return bodies[0].unsqueeze(0)
    rows = empty((len(bodies), ceil_div(bodies[0].numel(), 8) * 8), torch.uint8, bodies[0])
    rows = rows[:, : bodies[0].numel()]
    for row, body in zip(rows, bodies):
        row.copy_(body)
    return rows


def read_field(bodies: torch.Tensor, at: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """An array of each body."""
    if num_bytes == 0:
        return empty((len(bodies), 0), dtype, bodies)
    part = bodies[:, at : at + num_bytes]
    return part[0].view(dtype).unsqueeze(0) if len(part) == 1 else part.view(dtype)


def read_scalar(bodies: torch.Tensor, at: int, bad: torch.Tensor) -> torch.Tensor:
    """A scalar of each body, float64[W]. Sets the flag `bad` if one is not finite."""
    values = read_field(bodies, at, 4, torch.float32)[:, 0].to(torch.float64)
    bad |= (~torch.isfinite(values)).any().to(torch.int32)
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def shorten_runs(body: torch.Tensor, at: int) -> torch.Tensor:
    """The body with the bytes from `at` on zero-run encoded. Synchronizes with the device."""
    packed = body[at:]
    others = torch.nonzero(packed != ZERO_BYTE).flatten()
    # A run, possibly of no zeros, precedes each nonzero byte and the end.
    ends = torch.cat([others.new_full((1,), -1), others, others.new_full((1,), packed.numel())])
    runs = torch.diff(ends) - 1
    places = torch.cumsum((runs + MAX_RUN - 1) // MAX_RUN + 1, dim=0)  # of these bytes, after one that is dropped
    out = packed.new_full((int(places[-1]),), NUM_QUARTIC - 2 + MAX_RUN)
    last = (runs - 1) % MAX_RUN + 1  # zeros in the last piece of a run, after the maximal ones
    out[places - 1] = torch.where(last == 1, ZERO_BYTE, NUM_QUARTIC - 2 + last).to(torch.uint8)
    out[places[:-1]] = packed[others]  # also overwrites the bytes of runs of no zeros
    return torch.cat([body[:at], out[1:]])


def expand_runs(body: torch.Tensor, at: int, num_bytes: int) -> torch.Tensor | None:
    """Undo `shorten_runs`; None if the bytes are no encoding of `num_bytes` bytes. Synchronizes with the device."""
    coded = body[at:]
    if body.numel() < at or coded.numel() > num_bytes:
        return None
    is_run = coded >= NUM_QUARTIC
    is_zero = is_run | (coded == ZERO_BYTE)
    lengths = torch.where(is_run, coded.to(torch.int64) - (NUM_QUARTIC - 2), 1)
    is_cut_short = is_zero[1:] & is_zero[:-1] & (lengths[:-1] < MAX_RUN)
    if not ((lengths.sum() == num_bytes) & ~is_cut_short.any()).item():
        return None
    values = coded.masked_fill(is_run, ZERO_BYTE)
    return torch.cat([body[:at], torch.repeat_interleave(values, lengths, output_size=num_bytes)])
