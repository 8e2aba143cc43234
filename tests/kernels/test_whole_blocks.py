"""Blocks of 1,024 to 4-bit indices: the same bytes as the reference, for every table, element type and position."""

import numpy as np
import pytest

from gradwire.compressors.support import thc_choice, thc_tables
from gradwire.kernels import reference
from gradwire.kernels.blocks import BlockLayout, index_bytes, num_sign_words, padded_size
from gradwire.kernels.cpu.whole_blocks import BLOCK, cells_of
from tests.kernels.samples import DTYPES, assert_backends_agree, empty, gradients

FITTING = {
    "chosen": thc_tables.optimal(4, 59, 1 / 32).values,
    "even": tuple(range(16)),
    "gaps that round": (0, 300, 320, 330, 384, 400, 448, 450, 512, 513, 576, 600, 700, 800, 900, 1023),
    "last integer of a cell": (0, *range(3, 60, 4)),
}
CROWDED = (*range(15), 63)


def bytes_of(table: tuple[int, ...]) -> bytes:
    return np.array(table, np.uint32).tobytes()


def test_every_table_that_thc_chooses_has_cells():
    for world_size in (1, 2, 4, 8, 15, 16, 18, 64, 1000, 4369):
        for p in (1 / 32, None):
            table = thc_choice.choose(world_size, 4, p, None).table
            assert cells_of(bytes_of(table.values)) is not None, table


def test_two_values_inside_a_cell_do_not_fit():
    assert cells_of(bytes_of(CROWDED)) is None


@pytest.mark.parametrize("name", FITTING)
def test_cells_find_the_index_of_every_integer(name):
    table = np.array(FITTING[name], np.uint32)
    cells = cells_of(table.tobytes())
    assert cells is not None
    integers = np.arange(table[-1] + 1)
    cell = integers >> cells.shift
    found = cells.integers[cell] + (integers >= cells.floats[32:][cell])
    np.testing.assert_array_equal(found, np.searchsorted(table, integers, side="right") - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FITTING, "crowded"])
def test_backends_agree(name, dtype):
    """On whole blocks and a part of one, with and without the residual, in place and not."""
    size, table = 3 * BLOCK + 100, np.array(FITTING.get(name, CROWDED), np.uint32)
    rng, top = np.random.default_rng(1), float(table[-1])
    signs = np.empty(num_sign_words(padded_size(size, BLOCK, True)), np.uint32)
    reference.random32(99, 0, signs)
    blocks = BlockLayout(size, BLOCK, True, signs, 0)
    ranges = ((0.01, 0.1), (-4, -2), (top / 8, top / 4), (0.1, 1), (-1, 1))
    units, lows, rates, factors, bases = (
        rng.uniform(low, high, blocks.num_blocks).astype(np.float32) for low, high in ranges
    )
    factors[1] = np.finfo(np.float32).max  # cut to the finite floats
    for x in gradients(dtype, size):

        def call(kernels, x=x):
            work, memory, found = np.empty(BLOCK, np.float32), x.copy(), []
            cases = [(x, None), (x, empty(size, "float32"))] + [(memory, memory)] * (dtype == "float32")
            for source, residual in cases:
                out = empty(index_bytes(blocks.padded, 4), "uint8")
                kernels.encode_indices(
                    source, blocks, units, lows, rates, table, 4, 11, 5 * BLOCK, work, out, factors, bases, residual
                )  # fmt: skip
                found += [out] if residual is None else [out, residual]
            return found

        assert_backends_agree(call)
