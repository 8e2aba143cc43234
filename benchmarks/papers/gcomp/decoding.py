"""Three ways to decode exponents: with the tree of the code, with one lookup per symbol, and as gradwire does.

The paper compares the first two (figure 13b). They are plain loops over one stream. All run on one core and on the same
gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradwire.kernels import active as kernels
from gradwire.kernels.cpu import streams
from gradwire.kernels.cpu.chunk_counts import mean_of, symbols_of
from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.words import peek
from gradwire.kernels.float_format import CHUNK, FORMATS, LEVELS, STREAMS
from gradwire.kernels.prefix_code import ESCAPE, NUM_SYMBOLS, PrefixCode

REPEATS = 7


@kernel
def _write(symbols, words, out):
    """Write all words as one stream, and return its length in bits."""
    bit = 0
    for i in range(symbols.size):
        word, length = words[symbols[i]] & 0xFFFFFF, words[symbols[i]] >> 24
        for place in range(length):
            out[(bit + place) >> 3] |= np.uint8(((word >> place) & 1) << ((bit + place) & 7))
        bit += length
    return bit


@kernel
def _by_tree(body, children, out):
    """Follow a branch for each bit. The children of a node are further nodes, or −1 − symbol."""
    bit = 0
    for i in range(out.size):
        node = 0
        while node >= 0:
            node = children[node, (body[bit >> 3] >> (bit & 7)) & 1]
            bit += 1
        symbol = -1 - node
        if symbol == 256:
            symbol = 0
            for place in range(8):
                symbol |= np.int64((body[bit >> 3] >> (bit & 7)) & 1) << place
                bit += 1
        out[i] = symbol


@kernel
def _by_lookup(body, table, out):
    """Look up each symbol by the next 11 bits. An entry is the symbol, with the bits of its word above bit nine."""
    bit = np.uint64(0)
    for i in range(out.size):
        window = peek(body, bit >> np.uint64(3)) >> (bit & np.uint64(7))
        entry = table[window & np.uint64(2047)]
        symbol, length = entry & np.uint64(511), entry >> np.uint64(9)
        if symbol == np.uint64(256):
            symbol = (window >> length) & np.uint64(255)
            length += np.uint64(8)
        out[i] = symbol
        bit += length


@kernel
def _pack_chunks(x, form, words, symbols, room, lengths, counts, out, ends):
    """Write eight streams for each chunk."""
    at = 0
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        mean = mean_of(chunk, form)
        symbols_of(chunk, form, mean, symbols, counts)
        streams.write_streams(symbols, chunk.size, words, room, lengths)
        at = streams.copy_streams(mean, room, lengths, out, at)
        ends[start // CHUNK] = at


@kernel
def _read_chunks(body, ends, size, lookup, lengths, symbols, specials):
    at = 0
    for number in range(ends.size):
        count = min(CHUNK, size - number * CHUNK)
        at, _ = streams.read_streams(body, at, ends[number], count, lookup, lengths, symbols, specials)
    return at


def decoding_rates(grad: np.ndarray) -> Iterator[dict[str, Any]]:
    """Symbols per second of each decoder on a gradient with its best code, and bits per symbol of that code."""
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    kernels.exponent_counts(grad, counts)
    code = PrefixCode.of(counts)
    symbols = _symbols(grad)
    body = np.zeros(3 * grad.size + 16, np.uint8)
    bits = _write(symbols, code.words, body) / grad.size
    out = np.empty(grad.size, np.uint8)
    table, tree = _table(code), _tree(code)
    ways: dict[str, Callable[[], object]] = {
        "tree": lambda: _by_tree(body, tree, out),
        "a lookup a symbol": lambda: _by_lookup(body, table, out),
        "gradwire": _ours(grad, code),
    }
    case = f"{bits:.2f} bits a symbol"
    for name, call in ways.items():
        call()
        assert name == "gradwire" or (out == symbols.astype(np.uint8)).all()
        rates = [grad.size / _seconds(call) / 1e9 for _ in range(REPEATS)]
        low, high = (float(np.percentile(rates, q)) for q in (20, 80))
        spread = {"value": statistics.median(rates), "p20": low, "p80": high, "samples": REPEATS}
        yield {"metric": "decoding", "method": name, "unit": "G symbols/s", "case": case, "size": grad.size, **spread}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _symbols(grad: np.ndarray) -> np.ndarray:
    form, found = tuple(FORMATS[np.dtype(np.float32)]), np.empty(grad.size + CHUNK, np.uint16)
    counts, bits = np.empty(LEVELS + 1, np.int64), grad.view(np.uint32)
    for start in range(0, grad.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        symbols_of(chunk, form, mean_of(chunk, form), found[start : start + CHUNK], counts)
    return found[: grad.size]


def _table(code: PrefixCode) -> np.ndarray:
    first, length = code._first()
    return (first | length << 9).astype(np.uint64)


def _tree(code: PrefixCode) -> np.ndarray:
    """Children of each node: int64[2N, 2]."""
    children, used = np.zeros((2 * NUM_SYMBOLS, 2), np.int64), 1
    first, length = code._first()
    for symbol in np.flatnonzero(code.lengths):
        word = int(np.flatnonzero((first == symbol) & (length == code.lengths[symbol]))[0])
        node = 0
        for place in range(int(code.lengths[symbol])):
            branch = (word >> place) & 1
            if place == int(code.lengths[symbol]) - 1:
                children[node, branch] = -1 - int(symbol)
            else:
                if children[node, branch] == 0:
                    children[node, branch], used = used, used + 1
                node = int(children[node, branch])
    assert ESCAPE == 256
    return children


def _ours(grad: np.ndarray, code: PrefixCode) -> Callable[[], object]:
    form = tuple(FORMATS[np.dtype(np.float32)])
    symbols, room = np.empty(CHUNK, np.uint16), np.empty(STREAMS * streams.BUFFER_BYTES, np.uint8)
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    chunks = -(-grad.size // CHUNK)
    body, ends = np.zeros(3 * grad.size + 64 * chunks, np.uint8), np.empty(chunks, np.int64)
    _pack_chunks(grad.view(np.uint32), form, code.words, symbols, room, lengths, counts, body, ends)
    read, specials = np.empty(STREAMS * streams.STRIDE, np.uint8), np.empty(CHUNK, np.uint64)

    def call() -> object:
        at = _read_chunks(body, ends, grad.size, code.lookup, code.lengths, read, specials)
        assert at == ends[-1], "what was written is read"
        return at

    return call
