"""Contributions that are cut into packets shorter than a chunk."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.aggregator.request import cut_chunks
from gradwire.aggregator.session import IndexTable
from gradwire.kernels import reference
from gradwire.kernels.blocks import index_bytes


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("elements", [256, 512])
@pytest.mark.parametrize("size", [1, 511, 512, 1024, 1531, 5003])
def test_packets_have_the_indices_of_the_chunks(bits: int, elements: int, size: int) -> None:
    table = IndexTable(bits, tuple(np.random.default_rng(bits).integers(0, 250, 1 << bits).tolist()), 8)
    packed = np.random.default_rng(size).integers(0, 256, index_bytes(size, bits), np.uint8)
    whole, found = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    reference.lookup_indices(packed, bits, table.array, whole)
    cut, at = cut_chunks(packed, size, table, elements), 0
    for start in range(0, size, elements):
        part = found[start : start + elements]
        num_bytes = index_bytes(part.size, bits)
        reference.lookup_indices(cut[at : at + num_bytes], bits, table.array, part)
        at += num_bytes
    assert at == cut.size
    assert found.tobytes() == whole.tobytes()
