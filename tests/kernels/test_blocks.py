"""The Hadamard transform, indices into tables, and sums of table values back to elements."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import reference
from gradwire.kernels.blocks import BlockLayout, index_bytes, num_sign_words, padded_size
from tests.kernels.samples import BACKENDS, DTYPES, assert_backends_agree, empty, gradients, random_normal

TABLES = {
    1: (0, 1), 2: (0, 1, 3, 4), 3: (0, 2, 3, 5, 7, 9, 10, 20), 4: (*range(8), *range(20, 28)),
    5: tuple(range(0, 64, 2)), 8: (*range(0, 1020, 4), 1023),
}  # fmt: skip
SIZES = [0, 1, 2, 63, 64, 65, 255, 1000, 1023, 1024, 1025, 3000, 5003]


def table_of(bits: int) -> np.ndarray:
    return np.array(TABLES[bits], np.uint32)


def blocks_of(size: int, block: int, rotated: bool = True, shift: int = 0) -> BlockLayout:
    words = np.empty(num_sign_words(padded_size(size, block, rotated)) if rotated else 0, np.uint32)
    reference.random32(99, 7, words)
    return BlockLayout(size, block, rotated, words, shift)


def work_of(blocks: BlockLayout) -> np.ndarray:
    return np.full(blocks.work_size, np.nan, np.float32)


def per_block(blocks: BlockLayout, seed: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, blocks.num_blocks).astype(np.float32)


# -- the transform ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 15, 1 << 17])
def test_transforms_agree(block):
    for seed in range(2):
        x = random_normal(block * max(1, 4096 // block), seed)
        found, expected = x.copy(), x.copy()
        BACKENDS[0].hadamard(found, block)
        reference.hadamard(expected, block)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("block", [2, 8, 64, 512])
def test_the_transform_is_that_of_the_matrix_and_its_own_inverse(kernels, block):
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).integers(-50, 50, 3 * block).astype(np.float32)
    y = x.copy()
    kernels.hadamard(y, block)
    np.testing.assert_array_equal(y.reshape(3, block), x.reshape(3, block) @ matrix)
    kernels.hadamard(y, block)
    np.testing.assert_array_equal(y, block * x)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_what_is_no_whole_block_is_refused(kernels):
    for size, block in ((100, 64), (96, 96), (8, 0)):
        with pytest.raises(ValueError, match="whole blocks of a power of two"):
            kernels.hadamard(np.zeros(size, np.float32), block)


# -- both backends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_and_extremes_agree(dtype, size):
    for x in gradients(dtype, size):
        for block, rotated in ((64, True), (1024, True), (2048, True), (128, False)):
            blocks = blocks_of(size, block, rotated, shift=5)

            def call(kernels, x=x, blocks=blocks):
                sums, low = np.empty(blocks.num_blocks), np.empty(blocks.num_blocks, np.float32)
                high = np.empty(blocks.num_blocks, np.float32)
                kernels.block_square_sums(x, blocks.block, sums)
                kernels.block_extremes(x, blocks, per_block(blocks, 1, 0.1, 2), work_of(blocks), low, high)
                return [sums, low, high]

            assert_backends_agree(call)


def encoded(kernels, x, blocks, bits, first=0, residual=None):
    """Packed indices with a scale and a center for each block."""
    out = empty(index_bytes(blocks.padded, bits), "uint8")
    top = float(TABLES[bits][-1])
    kernels.encode_indices(
        x, blocks, per_block(blocks, 2, 0.01, 0.1), per_block(blocks, 3, -4, -2),
        per_block(blocks, 4, top / 8, top / 4),
        table_of(bits), bits, 11, first, work_of(blocks), out,
        per_block(blocks, 5, 0.1, 1), per_block(blocks, 6, -1, 1), residual,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("bits", TABLES)
@pytest.mark.parametrize("size", SIZES)
def test_indices_and_residuals_agree(bits, size):
    for dtype in DTYPES if size == 1025 else DTYPES[:1]:
        for x in gradients(dtype, size):
            for block, rotated, first in ((1024, True, 0), (64, True, 5000), (2048, True, 1023), (256, False, 3)):
                blocks = blocks_of(size, block, rotated, shift=first % 32)

                def call(kernels, x=x, blocks=blocks, first=first):
                    residual = empty(size, "float32")
                    with_residual = encoded(kernels, x, blocks, bits, first, residual)
                    return [with_residual, residual, encoded(kernels, x, blocks, bits, first)]

                assert_backends_agree(call)


@pytest.mark.parametrize(
    ("bits", "lane"),
    [
        (bits, lane)
        for bits in TABLES
        for lane in (np.uint8, np.uint16, np.uint32)
        if TABLES[bits][-1] <= np.iinfo(lane).max
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_lanes_agree_and_are_the_sums_of_values(bits, lane, size):
    rng = np.random.default_rng(size)
    payloads = [rng.integers(0, 256, index_bytes(size, bits)).astype(np.uint8) for _ in range(3)]
    blocks = blocks_of(size, 64, rotated=False)

    def call(kernels):
        lanes, out, added = empty(size, lane), empty(size, "float32"), random_normal(size)
        alone = []
        for rank, payload in enumerate(payloads):
            kernels.lookup_indices(payload, bits, table_of(bits), lanes, accumulate=rank > 0)
            alone.append(empty(size, lane))
            kernels.lookup_indices(payload, bits, table_of(bits), alone[-1])
        np.testing.assert_array_equal(lanes, np.sum(alone, axis=0).astype(lane))
        arrays = per_block(blocks, 1, 0, 50), per_block(blocks, 2, 0, 1), per_block(blocks, 3, -1, 1)
        kernels.finalize_blocks(lanes, blocks, *arrays, work_of(blocks), out)
        kernels.finalize_blocks(lanes, blocks, *arrays, work_of(blocks), added, accumulate=True)
        return [lanes, *alone, out, added]

    assert_backends_agree(call)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [64, 1024, 4096])
def test_lowering_agrees(size, block):
    blocks = blocks_of(size, block, shift=31)
    lanes = np.random.default_rng(0).integers(0, 241, blocks.padded).astype(np.uint8)

    def call(kernels):
        out = empty(size, "float32")
        factors = per_block(blocks, 2, 0, 1)
        factors[:1] = np.finfo(np.float32).max  # cut to the finite floats
        kernels.finalize_blocks(
            lanes, blocks, per_block(blocks, 1, 0, 50), factors, per_block(blocks, 3, -1, 1), work_of(blocks), out
        )
        assert np.isfinite(out).all()
        return [out]

    assert_backends_agree(call)


# -- what they mean -----------------------------------------------------------------------------------------------


@st.composite
def tables(draw):
    bits = draw(st.integers(1, 5))
    top = draw(st.integers(2**bits - 1, 60))
    inner = draw(st.sets(st.integers(1, top - 1), min_size=2**bits - 2, max_size=2**bits - 2)) if bits > 1 else set()
    return bits, np.array([0, *sorted(inner), top], np.uint32)


@given(tables(), st.integers(1, 40), st.integers(1, 1500), st.integers(0, 2**32))
def test_the_sum_of_payloads_finalizes_to_the_sum_of_what_each_finalizes_to(coded, num_ranks, size, seed):
    """Exactly, for every table: centered sums are integers or halves, and so are their transforms."""
    bits, table = coded
    rng, blocks, kernels = np.random.default_rng(seed), blocks_of(size, 256), BACKENDS[0]
    one, none = np.ones(blocks.num_blocks, np.float32), np.zeros(blocks.num_blocks, np.float32)
    lanes, total = np.zeros(blocks.padded, np.uint16), np.zeros(size)
    for _ in range(num_ranks):
        payload = rng.integers(0, 256, index_bytes(blocks.padded, bits)).astype(np.uint8)
        kernels.lookup_indices(payload, bits, table, lanes, accumulate=True)
        alone, sent = np.zeros(blocks.padded, np.uint16), np.empty(size, np.float32)
        kernels.lookup_indices(payload, bits, table, alone)
        kernels.finalize_blocks(alone, blocks, one * table[-1] / 2, one, none, work_of(blocks), sent)
        total += sent
    out = np.empty(size, np.float32)
    halves = (one * num_ranks * table[-1] / 2).astype(np.float32)
    kernels.finalize_blocks(lanes, blocks, halves, one, none, work_of(blocks), out)
    np.testing.assert_array_equal(out, total)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("block", [64, 1024, 1 << 14])
def test_sums_are_exact_up_to_2_to_the_24_and_not_beyond(kernels, block):
    """Coordinates of a block add up to half of the largest value times its length, at most."""
    blocks = BlockLayout(block, block, True, np.zeros(num_sign_words(block), np.uint32), 0)
    one, none = np.ones(1, np.float32), np.zeros(1, np.float32)

    def finalized(sums, largest):
        out, exact = np.empty(block, np.float32), sums - largest / 2
        kernels.finalize_blocks(sums, blocks, one * np.float32(largest / 2), one, none, work_of(blocks), out)
        reference.hadamard(exact, block)  # in float64
        return out, exact

    largest, rng = (1 << 25) // block, np.random.default_rng(block)
    nearly = np.full(block, largest, np.uint32)
    nearly[-1] -= 1
    ends, between = rng.integers(0, 2, block) * largest, rng.integers(0, largest + 1, block)
    for sums in (nearly, ends.astype(np.uint32), between.astype(np.uint32)):
        np.testing.assert_array_equal(*finalized(sums, largest))
    found, exact = finalized(nearly + np.uint32(1), largest + 1)
    assert exact[0] > 1 << 24 and found[0] != exact[0]


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("block", [64, 1024])
def test_residual_is_what_lowering_lacks_and_may_be_the_memory_of_x(kernels, block):
    x = random_normal(3000)
    blocks, bits = blocks_of(3000, block), 4
    residual, memory = np.empty(3000, np.float32), x.copy()
    packed = encoded(kernels, x, blocks, bits, 17, residual)
    np.testing.assert_array_equal(encoded(kernels, memory, blocks, bits, 17, memory), packed)
    np.testing.assert_array_equal(memory, residual)
    lanes, sent = np.empty(blocks.padded, np.uint8), np.empty(3000, np.float32)
    kernels.lookup_indices(packed, bits, table_of(bits), lanes)
    halves = np.full(blocks.num_blocks, TABLES[bits][-1] / 2, np.float32)
    factors, bases = per_block(blocks, 5, 0.1, 1), per_block(blocks, 6, -1, 1)
    kernels.finalize_blocks(lanes, blocks, halves, factors, bases, work_of(blocks), sent)
    np.testing.assert_array_equal(residual, x - sent)


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_quantizing_is_unbiased_between_the_ends(bits):
    # 2^18 elements of one value; the mean has a standard deviation of sqrt(p (1 - p) / 2^18) gaps. Five of them have a
    # false-alarm rate of 6e-7 a value; keys are fixed, so the test cannot flicker.
    length = 1 << 18
    blocks, table = blocks_of(length, 1024, rotated=False), table_of(bits)
    one, zero = np.ones(blocks.num_blocks, np.float32), np.zeros(blocks.num_blocks, np.float32)
    for value in (-3.0, 0.0, 0.1, 1.7, 3.0, table[-1] - 0.25, float(table[-1]), 1e9):
        x, out = np.full(length, value, np.float32), empty(index_bytes(length, bits), "uint8")
        lanes, inside = np.empty(length, np.uint8), min(max(value, 0.0), float(table[-1]))
        BACKENDS[0].encode_indices(
            x, blocks, one, zero, one, table, bits, 1234, 0, work_of(blocks), out, one, zero
        )  # fmt: skip
        BACKENDS[0].lookup_indices(out, bits, table, lanes)
        near = set(table[(table <= inside)][-1:]) | set(table[(table >= inside)][:1])
        assert set(np.unique(lanes)) <= near
        low, high = min(near), max(near)
        p = (inside - low) / (high - low) if high > low else 0.0
        # 16 random bits place p to 2^-16.
        assert abs(lanes.mean() - inside) <= (high - low) * (5 * math.sqrt(p * (1 - p) / length) + 2**-16) + 1e-6


def test_a_chunk_stands_by_itself():
    """Any 1,024 indices of a payload are separate bytes, which a packet can carry."""
    rng, bits = np.random.default_rng(0), 3
    payload = rng.integers(0, 256, index_bytes(5000, bits)).astype(np.uint8)
    whole, part = np.empty(5000, np.uint8), np.empty(1024, np.uint8)
    BACKENDS[0].lookup_indices(payload, bits, table_of(bits), whole)
    chunk = index_bytes(1024, bits)
    for number in range(4):
        BACKENDS[0].lookup_indices(payload[number * chunk : (number + 1) * chunk], bits, table_of(bits), part)
        np.testing.assert_array_equal(part, whole[number * 1024 : (number + 1) * 1024])


@pytest.mark.parametrize("kernels", BACKENDS)
def test_wrong_lengths_are_refused(kernels):
    blocks, x = blocks_of(1500, 1024), np.zeros(1500, np.float32)
    two, work = np.ones(2, np.float32), np.empty(1024, np.float32)
    with pytest.raises(ValueError, match="Expected out of 768 elements, got 5"):
        kernels.encode_indices(
            x, blocks, two, two, two, table_of(4), 4, 0, 0, work, np.empty(5, np.uint8), two, two
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"Expected a table of 2\^bits values, got 4 for 4 bits"):
        kernels.lookup_indices(np.empty(10, np.uint8), 4, table_of(2), np.empty(20, np.uint8))
    with pytest.raises(ValueError, match="Expected packed of 10 elements, got 9"):
        kernels.lookup_indices(np.empty(9, np.uint8), 4, table_of(4), np.empty(20, np.uint8))
    with pytest.raises(ValueError, match="Expected accumulator of 1536 elements, got 1500"):
        kernels.finalize_blocks(np.zeros(1500, np.uint8), blocks, two, two, two, work, x)
    with pytest.raises(ValueError, match="Expected values of blocks of 2 elements, got 1"):
        kernels.finalize_blocks(np.zeros(1536, np.uint8), blocks, two[:1], two, two, work, x)
    with pytest.raises(ValueError, match="Expected blocks of 7 elements, got 1500"):
        kernels.finalize_blocks(np.zeros(1536, np.uint8), blocks, two, two, two, work, x[:7])
