"""Zero-run encoding: a run of 2 to 14 bytes ZERO_BYTE becomes one byte, 243 + (length - 2).

Longer runs are split into maximal runs from the start. Each input has one encoding, and the decoder accepts no other.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3.3.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import MAX_RUN, NUM_QUARTIC, ZERO_BYTE


def zero_run_encode(src: np.ndarray, out: np.ndarray) -> int:
    """Encode `src`, uint8 below 243, into `out`; return the length written.

    `out` must hold len(src) bytes, which the encoding never exceeds. Bytes past the returned length are unspecified.
    """
    if out.size < src.size:
        raise ValueError(f"Expected out of at least {src.size} elements, got {out.size} (in zero_run_encode).")
    length = run = 0
    for byte in [*src.tolist(), -1]:
        if byte == ZERO_BYTE and run < MAX_RUN:
            run += 1
            continue
        if run:
            out[length] = ZERO_BYTE if run == 1 else NUM_QUARTIC + run - 2
            length += 1
        run = int(byte == ZERO_BYTE)
        if 0 <= byte != ZERO_BYTE:
            out[length] = byte
            length += 1
    return length


def zero_run_decode(src: np.ndarray, out: np.ndarray) -> int:
    """Decode `src` into `out`; return len(out), or -1 if `src` is not the encoding of that many bytes.

    Writes only to `out`, whatever the bytes are. After -1, `out` is unspecified.
    """
    length = 0
    may_continue = True  # whether a zero token may come here: not after one that is shorter than maximal
    for byte in src.tolist():
        is_zero = byte == ZERO_BYTE or byte >= NUM_QUARTIC
        count = byte - NUM_QUARTIC + 2 if byte >= NUM_QUARTIC else 1
        if (is_zero and not may_continue) or length + count > out.size:
            return -1
        out[length : length + count] = ZERO_BYTE if is_zero else byte
        length += count
        may_continue = not is_zero or count == MAX_RUN
    return length if length == out.size else -1
