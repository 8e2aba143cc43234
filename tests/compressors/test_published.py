"""The published algorithms in the language: how long they are."""

from __future__ import annotations

import pytest

import gradwire.compressors as compressors
from gradwire.compressors.traced import TracedCompressor
from tests.lang import algorithms

TRACED = [name for name in compressors.names() if isinstance(compressors.make(name), TracedCompressor)]


def num_lines(name: str) -> int:
    """Encoder and decoder with their signatures and decorators, without documentation."""
    codec = compressors.make(name)
    # The one of the registry that is called onebit has kernels of its own.
    program = codec.program if isinstance(codec, TracedCompressor) else algorithms.program("two_means")
    return program.num_encode_lines + program.num_decode_lines


@pytest.mark.parametrize("name", TRACED)
def test_no_algorithm_has_more_than_29_lines(name) -> None:
    """As in table 5 of HiPress, whose longest is GradDrop with 29."""
    assert 3 < num_lines(name) <= 29


def test_the_five_of_hipress_average_at_most_23_lines() -> None:
    known = [name for name in ("onebit", "tbq", "minmax", "dgc", "graddrop") if name in compressors.names()]
    assert sum(map(num_lines, known)) / len(known) <= 23
