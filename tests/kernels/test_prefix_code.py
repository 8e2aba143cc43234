from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.core.errors import PayloadError
from gradwire.kernels.prefix_code import ESCAPE, MAX_LENGTH, NUM_SYMBOLS, RAW_BITS, SERIAL_BYTES, PrefixCode

COUNTS = st.dictionaries(st.integers(0, 255), st.integers(1, 1 << 40), max_size=40)


def counts_of(found: dict[int, int]) -> np.ndarray:
    counts = np.zeros(256, np.int64)
    for symbol, count in found.items():
        counts[symbol] = count
    return counts


def entries(code: PrefixCode) -> list[tuple[str, int]]:
    """Each word as text, first bit first, and its symbol."""
    found = []
    for symbol in np.flatnonzero(code.lengths):
        word = int(code.words[symbol]) & 0xFFFFFF
        length = int(code.lengths[symbol])
        found.append((format(word & (1 << length) - 1, f"0{length}b")[::-1], int(symbol)))
    return found


@given(found=COUNTS)
@example(found={})
@example(found={0: 1})
@example(found=dict.fromkeys(range(256), 1))
@example(found={symbol: 2**symbol for symbol in range(40)})  # native words of up to 39 bits
@example(found={255: 1 << 40})
def test_codes_are_complete_prefix_free_and_of_limited_length(found):
    code = PrefixCode.of(counts_of(found))
    words = entries(code)
    assert sum(2.0 ** -len(word) for word, _ in words) == 1
    for word, _ in words:
        assert not any(other.startswith(word) for other, _ in words if other != word)
    assert len({word for word, _ in words}) == len(words)
    assert code.lengths.max() <= MAX_LENGTH
    assert code.lengths[0] > 0
    assert code.lengths[ESCAPE] > 0


@given(found=COUNTS)
def test_what_has_no_word_is_an_escape_and_the_symbol(found):
    code = PrefixCode.of(counts_of(found))
    escape = int(code.lengths[ESCAPE])
    marker = int(code.words[ESCAPE]) & (1 << escape) - 1
    for symbol in range(NUM_SYMBOLS):
        word, length = int(code.words[symbol]) & 0xFFFFFF, int(code.words[symbol]) >> 24
        if symbol == ESCAPE or not code.lengths[symbol]:
            assert (word, length) == (marker | (symbol & 0xFF) << escape, escape + RAW_BITS)
        else:
            assert length == code.lengths[symbol]


def test_more_frequent_symbols_have_shorter_words_and_rare_ones_none():
    counts = np.zeros(256, np.int64)
    counts[100:140] = 2 ** np.arange(40)
    lengths = PrefixCode.of(counts).lengths
    assert lengths[139] == 1
    assert list(lengths[130:140]) == sorted(lengths[130:140], reverse=True)
    assert not lengths[100:125].any()


def test_the_code_is_huffmans_where_no_word_is_too_long():
    counts = np.zeros(256, np.int64)
    counts[[0, 1, 2, 3]] = 40, 30, 20, 9
    lengths = PrefixCode.of(counts).lengths  # the escape weighs 1
    assert [*lengths[:4], lengths[ESCAPE]] == [1, 2, 3, 4, 4]


def test_expected_length_is_within_a_bit_of_the_entropy():
    shares = np.exp(-0.5 * ((np.arange(256) - 120) / 2.0) ** 2)
    counts = np.rint(shares * 1e6).astype(np.int64)
    code = PrefixCode.of(counts)
    p = counts / counts.sum()
    entropy = -(p[p > 0] * np.log2(p[p > 0])).sum()
    assert entropy <= (p * (code.words[:256] >> 24)).sum() <= entropy + 0.1


@given(found=COUNTS)
def test_lookups_give_what_reading_bit_by_bit_gives(found):
    code = PrefixCode.of(counts_of(found))
    words = dict(entries(code))
    for window in range(0, 1 << MAX_LENGTH, 7):
        bits, symbols = format(window, f"0{MAX_LENGTH}b")[::-1], []
        while len(symbols) < 6:
            word = next((bits[:n] for n in range(1, len(bits) + 1) if bits[:n] in words), None)
            if word is None or words[word] == ESCAPE:
                break
            symbols.append(words[word])
            bits = bits[len(word) :]
        entry = int(code.lookup[window]).to_bytes(8, "little")
        assert entry[6] == len(symbols)
        assert list(entry[: entry[6]]) == symbols
        assert entry[7] == MAX_LENGTH - len(bits)


@given(found=COUNTS)
def test_lengths_come_back_from_their_bytes(found):
    code = PrefixCode.of(counts_of(found))
    data = code.to_bytes()
    again = PrefixCode.from_bytes(data)
    assert len(data) == SERIAL_BYTES
    assert (again.lengths == code.lengths).all()
    assert (again.words == code.words).all()
    assert again.number == code.number


def test_other_codes_have_other_numbers():
    numbers = {PrefixCode.of(counts_of({symbol: 5})).number for symbol in range(1, 256)}
    assert len(numbers) == 255


@given(data=st.binary(max_size=140))
@example(data=bytes(SERIAL_BYTES))
@example(data=b"\xff" * SERIAL_BYTES)
@example(data=PrefixCode.of(np.ones(256, np.int64)).to_bytes()[:-1])
@example(data=PrefixCode.of(np.ones(256, np.int64)).to_bytes()[:-1] + b"\xf8")
def test_any_bytes_are_a_code_or_refused(data):
    try:
        code = PrefixCode.from_bytes(data)
    except PayloadError:
        return
    assert code.to_bytes() == data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({5: 12}, "a word of 12 bits"),
        ({0: 0}, "no word for 0 or for the escape"),
        ({ESCAPE: 0}, "no word for 0 or for the escape"),
        ({0: 2, ESCAPE: 2}, "words that fill 1024 of 2048 places"),
        ({5: 1}, "words that fill 3072 of 2048 places"),
    ],
)
def test_lengths_that_are_no_code_are_refused_with_advice(change, said):
    lengths = np.zeros(NUM_SYMBOLS, np.uint8)
    lengths[[0, ESCAPE]] = 1
    for symbol, length in change.items():
        lengths[symbol] = length
    with pytest.raises(ValueError, match=said) as caught:
        PrefixCode(lengths)
    assert "PrefixCode.of(counts)" in str(caught.value)
