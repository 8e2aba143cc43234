"""The levels of fidelity."""

import itertools

import pytest

from gradwire.compressors.base import SummableCompressor
from gradwire.compressors.base.registry import compressor_of, spec_of
from gradwire.core.errors import UnknownNameError
from gradwire.planner import fidelity
from gradwire.sync.strategies import STRATEGIES


def test_each_level_allows_what_the_one_before_does_and_more():
    levels = [fidelity.methods(name, optimizer=True, momentum=False) for name in fidelity.LEVELS]
    assert list(fidelity.LEVELS) == ["exact", "near-lossless", "balanced", "aggressive"]
    for less, more in itertools.pairwise(levels):
        assert more[: len(less)] == less
        assert len(more) > len(less)


def test_every_method_exists_and_travels_by_known_strategies():
    for method in fidelity.methods("aggressive"):
        assert spec_of(compressor_of(method.spec)) == method.spec
        assert set(method.strategies) <= set(STRATEGIES)
        assert method.strategies


def test_exact_is_exact_and_a_ring_is_for_what_it_does_not_wear_down():
    assert all(compressor_of(method.spec).exact for method in fidelity.methods("exact"))
    for method in fidelity.methods("aggressive"):
        compressor = compressor_of(method.spec)
        if not isinstance(compressor, SummableCompressor) and (
            compressor.default_feedback == "error" or compressor.unbiased
        ):
            assert compressor.exact or "ring" not in method.strategies


def test_strategies_of_a_method_that_no_level_names_are_the_careful_ones():
    assert fidelity.strategies("fp16") == fidelity.EVERYWHERE
    assert fidelity.strategies("topk:ratio=0.1") == fidelity.LISTED
    assert fidelity.strategies("signsgd") == fidelity.FEW_ENCODES


def test_what_needs_the_optimizer_is_left_out_where_none_is_known():
    assert [method.spec for method in fidelity.methods("exact", optimizer=True)] == ["none", "lossless"]
    with_it, without = (fidelity.methods("near-lossless", optimizer=known) for known in (True, False))
    assert {method.spec for method in with_it} - {method.spec for method in without} == {"gcomp"}


def test_what_suffers_from_momentum_counts_to_the_next_level_where_the_optimizer_has_it():
    without, with_it = (fidelity.methods("balanced", momentum=known) for known in (False, True))
    assert {method.spec for method in without} - {method.spec for method in with_it} == {"threelc"}
    assert fidelity.methods("aggressive", momentum=True) == fidelity.methods("aggressive", momentum=False)


def test_momentum_correction_encodes_no_sum_again():
    for method in fidelity.methods("aggressive"):
        found = method.with_momentum_correction()
        if not compressor_of(method.spec).exact:
            assert found.strategies, method
            assert set(found.strategies) <= {"allgather", "sparse_reduce"}


def test_an_unknown_level_lists_the_known():
    with pytest.raises(UnknownNameError, match="Did you mean 'balanced'"):
        fidelity.methods("balance")


def test_batches_are_cast_from_near_lossless_on_and_to_what_reaches_as_far_as_float32():
    assert fidelity.batch_cast(fidelity.methods("exact")) is None
    for name in ("near-lossless", "balanced", "aggressive"):
        assert fidelity.batch_cast(fidelity.methods(name)) == "bf16"
    assert fidelity.batch_cast([fidelity.RankedCompressor("fp16", ("ring",))]) == "fp16"
    assert fidelity.batch_cast([fidelity.RankedCompressor("onebit", ("ring",))]) is None
