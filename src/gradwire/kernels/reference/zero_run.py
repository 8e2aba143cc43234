"""Zero-run encoding: runs of 2 to 14 bytes ZERO_BYTE become one byte, 243 + (length - 2).

A long run is cut into maximal runs first, so every input has one encoding, and the decoder takes no other.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3.3.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import MAX_RUN, NUM_QUARTIC, ZERO_BYTE


def zero_run_encode(src: np.ndarray, out: np.ndarray) -> int:
    """Encode uint8 `src`, whose bytes are below 243, into `out` and return the length written.

    `out` must hold len(src) bytes: the encoding is never longer. What lies past the length is unspecified.
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
    """Decode `src` into `out`; return len(out), or -1 unless `src` is the encoding of that many bytes.

    Nothing outside `out` is written whatever `src` holds. After -1 its contents are unspecified.
    """
    length = 0
    may_continue = True  # whether a zero token may stand here: not after one that is shorter than maximal
    for byte in src.tolist():
        is_zero = byte == ZERO_BYTE or byte >= NUM_QUARTIC
        count = byte - NUM_QUARTIC + 2 if byte >= NUM_QUARTIC else 1
        if (is_zero and not may_continue) or length + count > out.size:
            return -1
        out[length : length + count] = ZERO_BYTE if is_zero else byte
        length += count
        may_continue = not is_zero or count == MAX_RUN
    return length if length == out.size else -1
