"""Zero-run encoding. Contracts: `reference.zero_run`.

Both directions go from one zero token to the next, which a comparison of 64 bytes finds. The bytes before it are copied
as one vector; later tokens overwrite the excess.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import as_writable
from gradwire.kernels.cpu.lanes import mask_bits, splat, trailing_zeros
from gradwire.kernels.cpu.vector import load, store
from gradwire.kernels.layout import MAX_RUN, NUM_QUARTIC, ZERO_BYTE

_STEP = 64


@kernel
def _run_length(src, start):
    """Number of bytes equal to ZERO_BYTE from `start` on."""
    i = start
    while i < src.size:
        others = mask_bits(load(src, i, _STEP) != ZERO_BYTE)
        if others != 0:
            return i + trailing_zeros(others) - start
        i += _STEP
    return src.size - start


@kernel
def shorten_runs(src, out):
    """`zero_run_encode` for compiled callers. `out` must hold as many bytes as `src`."""
    i = length = 0
    while i < src.size:
        bytes_ = load(src, i, _STEP)
        zeros = mask_bits(bytes_ == ZERO_BYTE)
        store(out, length, bytes_)
        num_literals = min(src.size - i, trailing_zeros(zeros) if zeros != 0 else _STEP)
        i += num_literals
        length += num_literals
        if zeros == 0:
            continue
        run = _run_length(src, i)
        i += run
        while run >= MAX_RUN:
            out[length] = 255
            length += 1
            run -= MAX_RUN
        if run > 0:
            out[length] = ZERO_BYTE if run == 1 else NUM_QUARTIC + run - 2
            length += 1
    return length


def zero_run_encode(src: np.ndarray, out: np.ndarray) -> int:
    if out.size < src.size:
        raise ValueError(f"Expected out of at least {src.size} elements, got {out.size} (in zero_run_encode).")
    return int(shorten_runs(as_writable(src), out))


@kernel
def expand_runs(src, out):
    """`zero_run_decode` for compiled callers."""
    i = length = 0
    may_continue = True  # whether a zero token may come here: not after one that is shorter than maximal
    while i < src.size:
        bytes_ = load(src, i, _STEP)
        tokens = mask_bits(bytes_ == ZERO_BYTE) | mask_bits(bytes_ >= NUM_QUARTIC)
        num_literals = min(src.size - i, trailing_zeros(tokens) if tokens != 0 else _STEP)
        if length + num_literals > out.size:
            return -1
        if num_literals > 0:
            store(out, length, bytes_)
            may_continue = True
        i += num_literals
        length += num_literals
        if tokens == 0:
            continue
        token = np.int64(src[i])
        count = token - NUM_QUARTIC + 2 if token >= NUM_QUARTIC else 1
        if not may_continue or length + count > out.size:
            return -1
        store(out, length, splat(np.uint8(ZERO_BYTE), 16))
        may_continue = count == MAX_RUN
        i += 1
        length += count
    return length if length == out.size else -1


def zero_run_decode(src: np.ndarray, out: np.ndarray) -> int:
    return int(expand_runs(as_writable(src), out))
