"""Small algorithms for the tests of the language, which together use every operator and every type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gradwire.lang import (
    bfloat16,
    ceil,
    concat,
    count,
    exponent,
    float16,
    floor,
    int8,
    int32,
    maximum,
    mean,
    minimum,
    norm,
    power,
    random,
    round_even,
    sign,
    sqrt,
    trace,
    trit,
    uint,
    uint1,
    uint2,
    uint4,
    uint8,
    where,
)
from gradwire.lang.ir import Program

_PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def names() -> list[str]:
    return sorted(_PAIRS)


def program(name: str, **options: Any) -> Program:
    encode, decode = _PAIRS[name]
    defaults = {key: p.default for key, p in list(inspect.signature(encode).parameters.items())[1:]}
    return trace(name, encode, decode, {**defaults, **options})


def _algorithm(decode: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(encode: Callable[..., Any]) -> Callable[..., Any]:
        _PAIRS[encode.__name__] = (encode, decode)
        return encode

    return wrap


@_algorithm(lambda p: p.q.map(lambda q: q * p.gap + p.low))
def between(g, bits=2):
    low, high = g.reduce(min), g.reduce(max)
    gap = (high - low) / (2**bits - 1)
    q = g.map(lambda x: floor((x - low) / gap + random(0, 1)), dtype=uint(bits))
    return concat(low=low, gap=gap, q=q)


@_algorithm(lambda p: p.sign.map(lambda s: where(s == 1, p.high, p.low)))
def two_means(g):
    low = g.filter(lambda x: x < 0).reduce(mean)
    high = g.filter(lambda x: x >= 0).reduce(mean)
    return concat(low=low, high=high, sign=g.map(lambda x: x >= 0, dtype=uint1))


@_algorithm(lambda p: p.q * p.scale)
def block_scales(g, block=100):
    scale = abs(g).blocks(block).reduce(max) / 127
    return concat(scale=scale, q=g.map(lambda x: floor(x / scale + random(0, 1)), dtype=int8))


@_algorithm(lambda p: p.q * p.s)
def ternary(g):
    s = abs(g).reduce(max)
    q = g.map(lambda x: sign(x) * where(random() < abs(x) / s, 1.0, 0.0), dtype=trit)
    return concat(s=s, q=q)


@_algorithm(lambda p: where(p.twice == 1, 2.0, 1.0) * p.q * p.s)
def few_trits(g, block=128):
    s = abs(g).blocks(block).reduce(max)
    q = g.map(lambda x: where(abs(x) > 0.9 * s, sign(x), 0.0), dtype=trit)
    twice = g.map(lambda x: abs(x) > 2.5, dtype=uint1)
    return concat(q=q.zero_runs(), s=s, twice=twice, unused=abs(g).reduce(mean))


@_algorithm(lambda p: p.value.scatter(p.index))
def sampled(g, ratio=0.01, sample=0.1):
    size = abs(g).sample(ceil(sample * g.size)).sort(descending=True)
    threshold = size[ceil(ratio * size.size)]
    kept = g.filter(lambda x: abs(x) >= threshold).top(ceil(ratio * g.size))
    return concat(index=kept.index, value=kept.value)


@_algorithm(lambda p: where(p.up == 1, p.scale, -p.scale).scatter(p.index))
def signs_of_large(g):
    least = abs(g).reduce(max) * 0.5
    kept = g.filter(lambda x: abs(x) >= least)
    scale = abs(kept.value).reduce(mean)
    up = kept.value > 0
    return concat(scale=scale, unused=up.reduce(count), index=kept.index, up=up.map(dtype=uint1))


@_algorithm(lambda p: p.q * p.s)
def whole_blocks(g, block=192):
    s = g.blocks(block).reduce(max)
    return concat(s=s, q=g.map(lambda x: x > 0.5 * s, dtype=uint1))


@_algorithm(lambda p: p.q * p.s / 7 * where(p.n == 1, -1.0, 1.0))
def block_norms(g, block=96):
    s = g.blocks(block).reduce(norm)
    q = g.map(lambda x: floor(abs(x) / s * 7 + random()), dtype=uint4)
    return concat(s=s, q=q, n=g.map(lambda x: x < 0, dtype=uint1), unused=(g < 0).blocks(block).reduce(count))


@_algorithm(lambda p: p.q * p.s)
def noisy_blocks(g, block=64):
    s = (abs(g) + random()).blocks(block).reduce(max)
    return concat(s=s, q=g.map(lambda x: sign(x) * where(random() < abs(x) / s, 1.0, 0.0), dtype=trit))


@_algorithm(lambda p: p.value.scatter(p.index))
def few_of_many(g, most=20):
    kept = g.filter(lambda x: x > 0.5, at_most=most)
    return concat(index=kept.index, value=kept.value, unused=kept.reduce(sum) + kept.reduce(count))


@_algorithm(lambda p: p.value.scatter(p.index))
def hashed(g, ratio=0.05):
    kept = g.filter(lambda x: abs(x) >= 1.5).hash(ceil(ratio * g.size))
    return concat(index=kept.index, value=kept.value, unused=kept.size + abs(g).reduce(mean))


@_algorithm(lambda p: p.value.scatter(p.index))
def first_few(g, ratio=0.05):
    kept = g.filter(lambda x: (x > 1) | (x < -1), at_most=ceil(ratio * g.size))
    return concat(index=kept.index, value=kept.value.map(dtype=bfloat16))


@_algorithm(lambda p: (p.value * 2.5).scatter(p.index))
def every_other(g):
    kept = g.filter(lambda _: random() < 0.5, at_most=ceil(0.5 * g.size) + 1)
    return concat(index=kept.index, value=kept.value)


@_algorithm(lambda p: where(p.minus == 1, -power(p.e), power(p.e)))
def powers(g):
    e = g.map(lambda x: exponent(x) + where(random() * 2 < 1, 1.0, 0.0), dtype=uint8)
    return concat(e=e, minus=g.map(lambda x: x < 0, dtype=uint1))


@_algorithm(lambda p: p.h + p.b)
def shorter_floats(g):
    h = g.map(lambda x: maximum(minimum(x, 6e4), -6e4), dtype=float16)
    return concat(h=h, b=(g - h).map(dtype=bfloat16))


@_algorithm(lambda p: where(p.minus == 1, -1.0, 1.0) * power(p.e))
def exponents(g):
    e = g.map(lambda x: exponent(x) + where(random() * power(exponent(x)) < abs(x) - power(exponent(x)), 1.0, 0.0))
    return concat(e=e.map(dtype=uint8), minus=g.map(lambda x: x < 0, dtype=uint1))


@_algorithm(lambda p: p.q * p.step)
def shared_scale(g):
    step = abs(g).reduce(max).over_ranks(max) / 2**20
    return concat(step=step, q=g.map(lambda x: round_even(x / step), dtype=int32))


@_algorithm(lambda p: (p.q - random(shared=True) + 0.5) * p.step)
def dithered(g):
    step = abs(g).reduce(max) / 100
    return concat(step=step, q=g.map(lambda x: floor(x / step + random(shared=True)), dtype=int8))


@_algorithm(lambda p: where(p.minus > 0, -1.0, 1.0) * p.whole + p.low - p.low)
def unchanged(g):
    return concat(low=g.reduce(min), whole=g, minus=g.map(lambda x: x * 0.0 > x, dtype=uint1))


@_algorithm(lambda p: (p.q - p.a) * p.b)
def two_rounds(g):
    low, high = g.reduce(min), g.reduce(max)
    a, b = (g - low).reduce(mean), (g - high).reduce(norm)
    return concat(a=a, b=b, q=g.map(lambda x: x / b + a, dtype=int8))


@_algorithm(lambda p: p.q / 128 * p.s)
def signed_zeros(g):
    s = abs(g).reduce(mean)
    return concat(s=s, q=g.map(lambda x: round_even(x / (abs(x) + s)), dtype=int8))


@_algorithm(lambda p: p.value.scatter(p.index))
def two_tops(g):
    kept = g.filter(lambda x: x != 0)
    few, many = kept.top(3), kept.top(7)
    least = maximum(abs(few.value).reduce(min), few.value[1]) + kept.value.size
    middle = kept.value.sort()[ceil(kept.size / 2)]
    return concat(index=many.index, value=where(abs(many.value) >= least, many.value, middle))


@_algorithm(lambda p: where(random(shared=True) < p.rate, p.q * p.step, 0.0))
def shared_choice(g, rate=0.5):
    step = sqrt(g.reduce(sum) * g.reduce(sum)) / g.size + abs(g).reduce(max)
    chosen = g.map(lambda x: where(random(shared=True) < rate, round_even(x / step * 1.5), 0.0) + 1, dtype=uint2)
    rest = 0.0 * g.filter(lambda x: x > 0).reduce(count)
    return concat(step=step, rate=rate + rest, unused=(g > 0).reduce(count), q=chosen)


@_algorithm(lambda p: (p.half + p.short / 2**20 + p.whole / 2**20) * p.scale)
def quotients(g):
    scale = abs(g).reduce(mean)
    whole = g / where(abs(g) > 1, 1.0, 0.0)  # infinite if smaller, no number if 0
    return concat(
        scale=scale, half=(g * 7e4).map(dtype=float16), short=(g / scale * 4).map(dtype=bfloat16), whole=whole
    )


@_algorithm(lambda p: (p.value / 2**40 * p.half + p.short / 4).scatter(p.index))
def quotients_of_large(g):
    kept = g.filter(lambda x: abs(x) >= 0.5).top(ceil(0.3 * g.size))
    value = kept.value / where(kept.value > 1, 1.0, 0.0)
    short = (kept.value * 4).map(dtype=bfloat16)
    return concat(index=kept.index, value=value, half=(kept.value * 7e4).map(dtype=float16), short=short)


@_algorithm(lambda p: p.low / 2**20 * p.q + p.high / 2**20)
def extremes(g, block=100):
    y = g / where(abs(g) > 2, 1.0, 0.0)  # infinite if smaller, no number if 0
    positive, none = y.filter(lambda x: x > 0).reduce(min), y.filter(lambda x: x != x).reduce(max)
    of_list = (g.filter(lambda x: x > 1).value / 0.0).reduce(min)
    low, high = (y * g).blocks(block).reduce(min), (y * g).blocks(block).reduce(max)
    return concat(
        low=low, high=high, least=y.reduce(min), most=y.reduce(max), positive=positive, none=none, of_list=of_list,
        q=g.map(dtype=uint1),
    )  # fmt: skip


@_algorithm(lambda p: p.q * p.scale + where(random(shared=True) < p.rate, p.offset, 0.0))
def known_numbers(g, rate=0.3):
    return concat(scale=1 / (g.size + 1), rate=rate, offset=3, large=1e300, q=g.map(round_even, dtype=int8))


@_algorithm(lambda p: p.q * p.gap + p.coarse * p.gap / 4 + p.fine * p.gap / 16)
def trits_and_levels(g):
    gap = abs(g).reduce(max)
    level = abs(g) / gap
    return concat(
        gap=gap, q=g.map(sign, dtype=trit), coarse=(level * 3).map(dtype=uint2), fine=(level * 15).map(dtype=uint4)
    )
