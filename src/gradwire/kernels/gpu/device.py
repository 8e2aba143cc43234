"""Device functions called by generated Triton code: elements, random numbers, reductions in canonical order.

Each program of a kernel handles a chunk of 1,024 elements as a vector. `i` holds their positions and `inside` is true
for those before the end. Nothing may be contracted to an FMA; `host.launch` ensures that.
"""
# Shapes: T = lanes of a program, a power of two from 64 to 1024

import triton
import triton.language as tl

# -- elements ------------------------------------------------------------------------------------------------


@triton.jit
def load_elements(source, i, inside):
    """Elements of any type as float32. int16 holds the bits of bfloat16."""
    x = tl.load(source + i, mask=inside, other=0)
    if source.dtype.element_ty == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def compensated(grad, scale, residual_in, i, inside):
    """The gradient to encode, when it is read first: scale · grad + residual."""
    x = load_elements(grad, i, inside) * scale
    if residual_in is not None:
        x = x + tl.load(residual_in + i, mask=inside, other=0.0)
    return x


@triton.jit
def compensated_again(grad, scale, residual_out, i, inside):
    """The gradient to encode, when it is read again: `residual_out` holds it if there is one."""
    if residual_out is not None:
        return tl.load(residual_out + i, mask=inside, other=0.0)
    return load_elements(grad, i, inside) * scale


@triton.jit
def magnitude_bits(x):
    """Absolute values as integers in the same order."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_flag(flag, condition):
    """Set the flag if the condition holds in any lane."""
    tl.store(flag, 1, mask=tl.max(condition.to(tl.int32), axis=0) > 0)


@triton.jit
def watch_for_nonfinite(watch, x):
    """Set the flag if a value is infinite or NaN."""
    raise_flag(watch, magnitude_bits(x) >= 0x7F800000)


@triton.jit
def spread(value, i):
    """The same value in every lane."""
    return tl.where(i >= 0, value, value)


@triton.jit
def number(mask):
    """1 where the mask is true, else 0."""
    return mask.to(tl.float32)


@triton.jit
def exponent(x):
    """Biased exponents, as floats."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255).to(tl.float32)


@triton.jit
def power(e):
    """Powers of two, from biased exponents."""
    return (e.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(size, x):
    """A magnitude with the sign of x; x itself if it is so large that it is an integer, or NaN."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    signed = ((size.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 8388608.0, signed, x)  # floats from 2^23 on are integers


@triton.jit
def floor(x):
    """The largest integer not above x. Triton's own `floor` treats subnormal numbers as 0."""
    truncated = tl.where(tl.abs(x) < 8388608.0, x, 0.0).to(tl.int32).to(tl.float32)
    return _with_sign(tl.where(truncated > x, truncated - 1.0, truncated), x)


@triton.jit
def ceil(x):
    """The smallest integer not below x."""
    truncated = tl.where(tl.abs(x) < 8388608.0, x, 0.0).to(tl.int32).to(tl.float32)
    return _with_sign(tl.where(truncated < x, truncated + 1.0, truncated), x)


@triton.jit
def round_even(x):
    """The nearest integer, halves to even."""
    return _with_sign((tl.abs(x) + 8388608.0) - 8388608.0, x)


@triton.jit
def clamp(y, low, high):
    """Clamp to [low, high] and truncate to integers; NaN becomes 0."""
    y = tl.where(y == y, y, 0.0)
    y = tl.where(y > low, y, low)
    y = tl.where(y < high, y, high)
    return y.to(tl.int32).to(tl.float32)


@triton.jit
def bounded(y, largest):
    """Clamp magnitudes to `largest`; NaN becomes 0."""
    y = tl.where(y == y, y, 0.0)
    y = tl.where(y > -largest, y, -largest)
    return tl.where(y < largest, y, largest)


@triton.jit
def finite(y):
    """Clamp to finite floats; NaN becomes 0."""
    return bounded(y, 3.4028234663852886e38)


@triton.jit
def rounded_float16(x):
    """Round to float16."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def bfloat16_bits(x):
    """Bits of the nearest bfloat16, int16; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.int16)


@triton.jit
def rounded_bfloat16(x):
    """Round to bfloat16."""
    return (bfloat16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)


# -- random --------------------------------------------------------------------------------------------------


@triton.jit
def philox(counter, key_low, key_high):
    """The four words of Philox4x32-7 of each counter."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    k0, k1 = c2 + tl.cast(key_low, tl.uint32), c2 + tl.cast(key_high, tl.uint32)
    for _ in tl.static_range(7):
        product_0, product_1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def chosen_word(words, which):
    """One of four words."""
    w0, w1, w2, w3 = words
    return tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))


@triton.jit
def random16(element, key_low, key_high):
    """The 16-bit values of global elements, with one counter for each: eight times the work of a whole group."""
    offset = element & 1023
    which = (offset >> 7).to(tl.int32)
    word = chosen_word(philox((element >> 10) * 128 + (offset & 127), key_low, key_high), which >> 1)
    return ((word >> ((which & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def random16_group(element, key_low, key_high):
    """The same for 1,024 elements that form a group, from 128 counters."""
    group = tl.min(element, axis=0) >> 10
    w0, w1, w2, w3 = philox(group * 128 + tl.arange(0, 128).to(tl.int64), key_low, key_high)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(tl.permute(halves, (2, 1, 3, 0)), [1024]).to(tl.int32)


@triton.jit
def uniform(element, key_low, key_high, is_group: tl.constexpr):
    """Numbers between 0 and 1 from 16 random bits."""
    if is_group:
        bits = random16_group(element, key_low, key_high)
    else:
        bits = random16(element, key_low, key_high)
    return (bits.to(tl.float32) + 0.5) * 0.0000152587890625


@triton.jit
def sample_position(j, count, n, key_low, key_high):
    """Position of the sample from part j of `count` equal parts of n elements."""
    words = philox((j >> 9) * 128 + (j & 127), key_low, key_high)
    word = chosen_word(words, ((j >> 7) & 3).to(tl.int32))
    start, end = j * n // count, (j + 1) * n // count
    return start + ((word.to(tl.int64) * tl.maximum(end - start, 1)) >> 32)


# -- reductions of a chunk -----------------------------------------------------------------------------------


@triton.jit
def _halves(rows):
    count: tl.constexpr = rows.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(rows, [2, count, 64]), (1, 2, 0)))


@triton.jit
def _add_1(lanes, rows):
    return lanes + tl.reshape(rows, [64])


@triton.jit
def _add_2(lanes, rows):
    first, second = _halves(rows)
    return _add_1(_add_1(lanes, first), second)


@triton.jit
def _add_4(lanes, rows):
    first, second = _halves(rows)
    return _add_2(_add_2(lanes, first), second)


@triton.jit
def _add_8(lanes, rows):
    first, second = _halves(rows)
    return _add_4(_add_4(lanes, first), second)


@triton.jit
def _add_16(lanes, rows):
    first, second = _halves(rows)
    return _add_8(_add_8(lanes, first), second)


@triton.jit
def _fold(lanes):
    half: tl.constexpr = lanes.shape[0] // 2
    first, second = tl.split(tl.permute(tl.reshape(lanes, [2, half]), (1, 0)))
    return first + second


@triton.jit
def chunk_sum(values):
    """Sum of T values in canonical order, float64: 64 running sums, then halved to one."""
    num_rows: tl.constexpr = values.shape[0] // 64
    rows = tl.reshape(values.to(tl.float64), [num_rows, 64])
    lanes = tl.zeros([64], tl.float64)
    if num_rows == 16:
        lanes = _add_16(lanes, rows)
    elif num_rows == 8:
        lanes = _add_8(lanes, rows)
    elif num_rows == 4:
        lanes = _add_4(lanes, rows)
    elif num_rows == 2:
        lanes = _add_2(lanes, rows)
    else:
        lanes = _add_1(lanes, rows)
    first, second = tl.split(_fold(_fold(_fold(_fold(_fold(lanes))))))
    return first + second


@triton.jit
def chunk_sum_squares(values):
    """Sum of squares of T values. The squares are exact in float64."""
    wide = values.to(tl.float64)
    return chunk_sum(wide * wide)


@triton.jit
def chunk_min(values, chosen):
    """The smallest of the chosen values other than NaN, or NaN if there is none."""
    chosen &= values == values
    least = tl.min(tl.where(chosen, values, float("inf")), axis=0)
    return tl.where(tl.max(chosen.to(tl.int32), axis=0) > 0, least, float("nan"))


@triton.jit
def chunk_max(values, chosen):
    """The largest of the chosen values other than NaN, or NaN if there is none."""
    chosen &= values == values
    most = tl.max(tl.where(chosen, values, float("-inf")), axis=0)
    return tl.where(tl.max(chosen.to(tl.int32), axis=0) > 0, most, float("nan"))


@triton.jit
def chunk_count(chosen):
    """Number of chosen values."""
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def sum_rows(parts, num_parts, out):
    """Kernel: add up 1,024 partial sums of each row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = chunk * 1024 + tl.arange(0, 1024)
    values = tl.load(parts + row * num_parts + j, mask=j < num_parts, other=0.0)
    tl.store(out + row * tl.num_programs(1) + chunk, chunk_sum(values))
