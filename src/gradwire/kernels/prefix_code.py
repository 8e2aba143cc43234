"""Prefix codes for exponents: canonical, of limited length, with an escape for symbols without a word of their own.

The lengths of the words determine the code, so two ends agree on it with 129 bytes. Words are assigned in the order of
(length, symbol), the escape last, and are read from the least significant bit of each byte.

Source: GCOMP (SoCC 2024), sections 4.3 (escape, "full transmission") and 4.5 (lookup table). Differences: the escape is
a symbol of the code, weighted by all symbols it stands for, where the paper truncates the first word that is too long;
the code is therefore complete and prefix-free by construction. A lookup yields up to six symbols.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import google_crc32c
import numpy as np

from gradwire.core.errors import PayloadError

NUM_EXPONENTS = 256
ESCAPE = 256
NUM_SYMBOLS = 257
RAW_BITS = 8
"""Bits of the symbol itself, which follows an escape."""

MAX_LENGTH = 11
"""n_θ, the longest word. The lookup table takes 16 KiB, a third to a half of a first-level cache."""
MAX_WORD_BITS = MAX_LENGTH + RAW_BITS

MAX_SYMBOLS_A_LOOKUP = 6
SERIAL_BYTES = (NUM_SYMBOLS + 1) // 2


@dataclass(frozen=True, eq=False)
class PrefixCode:
    """A prefix code over the symbols 0 to 255 and the escape.

    Args:
        lengths: Bits of each word, uint8[257], the escape last; 0 for symbols that are sent after an escape.

    Raises:
        ValueError: The lengths are not those of a complete prefix code with words for 0 and for the escape.
    """

    lengths: np.ndarray

    def __post_init__(self) -> None:
        problem = _problem(self.lengths)
        if problem:
            raise ValueError(f"These lengths are no complete prefix code: {problem}. Use PrefixCode.of(counts).")
        self.lengths.setflags(write=False)

    @classmethod
    def of(cls, counts: Sequence[int] | np.ndarray) -> PrefixCode:
        """The best code for these frequencies. Symbol 0 always has a word.

        Args:
            counts: Frequency of each symbol, 256 numbers. An optional 257th counts what only an escape can represent.
        """
        return cls(_lengths(np.asarray(counts, np.int64)))

    @classmethod
    def from_bytes(cls, data: bytes) -> PrefixCode:
        """Undo `to_bytes`. The bytes need not be trusted.

        Raises:
            PayloadError: The bytes are no code.
        """
        if len(data) != SERIAL_BYTES:
            raise PayloadError(f"Expected a prefix code of {SERIAL_BYTES} bytes, got {len(data)}.")
        packed = np.frombuffer(data, np.uint8)
        nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
        lengths = nibbles[:NUM_SYMBOLS].copy()
        problem = "a last half byte that is not 0" if nibbles[NUM_SYMBOLS] else _problem(lengths)
        if problem:
            raise PayloadError(f"Expected the lengths of a complete prefix code, got {problem}.")
        return cls(lengths)

    def to_bytes(self) -> bytes:
        """The lengths, four bits each."""
        nibbles = np.append(self.lengths, np.uint8(0)).reshape(-1, 2)
        return bytes(nibbles[:, 0] | nibbles[:, 1] << 4)

    @cached_property
    def number(self) -> int:
        """CRC-32C of `to_bytes`. Payloads carry it, so that they are never decoded with another code."""
        return int(google_crc32c.value(self.to_bytes()))

    @cached_property
    def words(self) -> np.ndarray:
        """The bits appended for each symbol, uint32[257]: the word in the low 24 bits, its length above them.

        For a symbol without a word: the escape and the symbol. The last entry is 0 after an escape.
        """
        own = _canonical(self.lengths)
        escape, escape_length = int(own[ESCAPE]), int(self.lengths[ESCAPE])
        words = np.empty(NUM_SYMBOLS, np.uint32)
        for symbol in range(NUM_SYMBOLS):
            word, length = int(own[symbol]), int(self.lengths[symbol])
            if symbol == ESCAPE or not length:
                word, length = escape | (symbol & 0xFF) << escape_length, escape_length + RAW_BITS
            words[symbol] = word | length << 24
        return words

    @cached_property
    def lookup(self) -> np.ndarray:
        """The symbols at the beginning of the next `MAX_LENGTH` bits, uint64[2048].

        Bytes of an entry, from the least significant: up to six symbols, their number, the bits of their words. Both
        numbers are 0 if an escape comes first.
        """
        windows = np.arange(1 << MAX_LENGTH)
        first, length = self._first()
        entries = np.zeros(windows.size, np.uint64)
        used, count = np.zeros(windows.size, np.int64), np.zeros(windows.size, np.int64)
        open_ = np.ones(windows.size, bool)
        for place in range(MAX_SYMBOLS_A_LOOKUP):
            rest = windows >> used
            open_ &= (length[rest] <= MAX_LENGTH - used) & (first[rest] != ESCAPE)
            entries[open_] |= first[rest][open_].astype(np.uint64) << np.uint64(8 * place)
            used[open_] += length[rest][open_]
            count += open_
        entries |= count.astype(np.uint64) << np.uint64(48) | used.astype(np.uint64) << np.uint64(56)
        return entries

    def _first(self) -> tuple[np.ndarray, np.ndarray]:
        """The first symbol in every combination of `MAX_LENGTH` bits, and the length of its word."""
        first, length = np.zeros(1 << MAX_LENGTH, np.int64), np.zeros(1 << MAX_LENGTH, np.int64)
        own = _canonical(self.lengths)
        for symbol in np.flatnonzero(self.lengths):
            bits = int(self.lengths[symbol])
            first[int(own[symbol]) :: 1 << bits] = symbol
            length[int(own[symbol]) :: 1 << bits] = bits
        return first, length


def _problem(lengths: np.ndarray) -> str:
    """What is wrong with these lengths; "" if they are a code."""
    if lengths.dtype != np.uint8 or lengths.shape != (NUM_SYMBOLS,):
        return f"{lengths.dtype}{list(lengths.shape)}"
    if int(lengths.max()) > MAX_LENGTH:
        return f"a word of {int(lengths.max())} bits, more than {MAX_LENGTH}"
    if not lengths[0] or not lengths[ESCAPE]:
        return "no word for 0 or for the escape"
    space = int((1 << (MAX_LENGTH - lengths[lengths > 0].astype(np.int64))).sum())
    return "" if space == 1 << MAX_LENGTH else f"words that fill {space} of {1 << MAX_LENGTH} places"


def _canonical(lengths: np.ndarray) -> np.ndarray:
    """The word of each symbol, uint32[257], the first bit least significant."""
    words = np.zeros(NUM_SYMBOLS, np.uint32)
    word = before = 0
    for symbol in sorted(np.flatnonzero(lengths).tolist(), key=lambda symbol: (int(lengths[symbol]), symbol)):
        length = int(lengths[symbol])
        word <<= length - before
        words[symbol] = int(format(word, f"0{length}b")[::-1], 2)
        word, before = word + 1, length
    return words


def _lengths(counts: np.ndarray) -> np.ndarray:
    """Lengths of the code for these counts. Symbols with more than `MAX_LENGTH` bits in Huffman's code get no word."""
    weights = np.append(counts[:NUM_EXPONENTS], 0)
    weights[0] = max(1, weights[0])
    weights[ESCAPE] = counts[NUM_EXPONENTS:].sum()
    seen = np.flatnonzero(weights[:NUM_EXPONENTS]).tolist()
    native = _native_lengths(weights[seen].tolist())
    own = [symbol for symbol, length in zip(seen, native, strict=True) if symbol == 0 or length <= MAX_LENGTH]
    weights[ESCAPE] = max(1, int(weights[ESCAPE]) + int(weights[seen].sum() - weights[own].sum()))
    lengths = np.zeros(NUM_SYMBOLS, np.uint8)
    lengths[[*own, ESCAPE]] = _limited_lengths([int(weights[symbol]) for symbol in (*own, ESCAPE)])
    return lengths


def _native_lengths(weights: list[int]) -> list[int]:
    """Word lengths of Huffman's code."""
    lengths = [0] * len(weights)
    heap = [(weight, index, [index]) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, tie, left), (b, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        for index in left + right:
            lengths[index] += 1
        heapq.heappush(heap, (a + b, tie, left + right))
    return lengths


def _limited_lengths(weights: list[int]) -> list[int]:
    """The best word lengths up to `MAX_LENGTH` (package-merge, Larmore and Hirschberg 1990)."""
    leaves = sorted((weight, [index]) for index, weight in enumerate(weights))
    packages: list[tuple[int, list[int]]] = []
    for _ in range(MAX_LENGTH):
        merged = sorted(leaves + packages)
        pairs = zip(merged[::2], merged[1::2], strict=False)
        packages = [(first[0] + second[0], first[1] + second[1]) for first, second in pairs]
    lengths = [0] * len(weights)
    for _, indices in packages[: len(weights) - 1]:
        for index in indices:
            lengths[index] += 1
    return lengths


@lru_cache(maxsize=1024)
def code_of_bytes(data: bytes) -> PrefixCode:
    """`PrefixCode.from_bytes`, with a cache, so that the tables of recent codes are kept."""
    return PrefixCode.from_bytes(data)
