import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu import select
from gradwire.kernels.cpu.select import _scratch, _select
from tests.kernels.samples import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    assert_backends_agree,
    empty,
    gradients,
    random_normal,
)

INDEX_TYPES = [np.uint32, np.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_top_k_agrees(dtype, length):
    for x in gradients(dtype, length):
        for k in {0, min(1, length), length // 100, length // 3, length}:

            def call(kernels, x=x, k=k):
                indices = np.empty(k, np.uint32)
                kernels.top_k(x, k, indices)
                return [indices]

            assert_backends_agree(call)


@given(
    x=st_numpy.arrays(np.float32, st.integers(1, 200), elements=st.floats(-4, 4, width=16)),
    fraction=st.floats(0, 1),
)
def test_top_k_keeps_the_largest_and_the_earliest_of_equals(x, fraction):
    k = int(fraction * x.size)
    indices = np.empty(k, np.int64)
    cpu.top_k(x, k, indices)
    # Sort by magnitude, then by index; keep k.
    expected = sorted(sorted(range(x.size), key=lambda i: (-abs(x[i]), i))[:k])
    assert indices.tolist() == expected


@pytest.mark.parametrize("kernels", BACKENDS)
def test_top_k_orders_what_is_not_finite(kernels):
    x = np.array([1, np.nan, -np.inf, 2, -np.nan, np.inf], np.float32)
    x.view(np.uint32)[[1, 4]] = 0x7FC00000, 0xFFC00000
    for k, expected in ((1, [1]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 4, 5]), (5, [1, 2, 3, 4, 5])):
        indices = np.empty(k, np.uint32)
        kernels.top_k(x, k, indices)
        assert indices.tolist() == expected


def test_top_k_keeps_what_torch_keeps():
    x = np.random.default_rng(0).permutation(100_000).astype(np.float32) - 50_000.25
    indices = np.empty(1000, np.uint32)
    cpu.top_k(x, 1000, indices)
    expected = torch.from_numpy(x).abs().topk(1000).indices.sort().values
    np.testing.assert_array_equal(indices, expected.numpy())


def _long_inputs():
    rng = np.random.default_rng(0)
    spread = random_normal(100_003)
    yield spread
    yield np.round(spread)  # few values, many ties
    yield np.where(np.arange(spread.size) < 5000, spread, 0)  # a sample misjudges it: all in one place
    yield np.full(spread.size, 0.25, np.float32)
    strewn = spread.copy()
    strewn[rng.integers(0, spread.size, 300)] = np.inf
    strewn[rng.integers(0, spread.size, 300)] = np.nan
    yield strewn


@pytest.mark.parametrize("k", [1, 100, 1000, 6000, 50_000])
def test_top_k_of_long_inputs_agrees(k):
    for x in _long_inputs():
        got, want = np.empty(k, np.uint32), np.empty(k, np.uint32)
        cpu.top_k(x.astype(np.float32), k, got)
        reference.top_k(x.astype(np.float32), k, want)
        np.testing.assert_array_equal(got, want)


def test_selection_pauses_when_nearly_full_and_stays_in_its_buffers():
    low, x = np.float32(50).view(np.uint32), np.arange(1, 301, dtype=np.float32)
    indices, values = np.full(180, 7, np.uint32), np.full(180, 7, np.float32)
    count, at = _select(x, 0, low, _scratch(np.float32), indices[10:170], values[10:170], 0)
    assert (count, at) == (79 + 64, 192)  # of the next 64, not all would have fitted
    np.testing.assert_array_equal(indices[10 : 10 + count], np.arange(49, 49 + count))
    np.testing.assert_array_equal(values[10 : 10 + count], np.arange(50, 50 + count))
    for buffer in (indices, values):
        assert (buffer[:10] == 7).all()
        assert (buffer[170:] == 7).all()
    assert _select(x, at, low, _scratch(np.float32), indices[10:170], values[10:170], 0) == (108, 300)
    assert indices[10] == 192


def _reads(monkeypatch, x, k) -> float:
    """How often top_k goes over x: what each of its passes is given, and where it ends."""
    read = 0

    def counted(name):
        kernel = getattr(select, name)

        def run(given, *args):
            nonlocal read
            found = kernel(given, *args)
            if given.size == x.size:
                read += found[1] - args[0] if name == "_select" else x.size
            return found

        monkeypatch.setattr(select, name, run)

    for name in ("_select", "_upper_histogram", "_lower_histogram", "_select_keys"):
        counted(name)
    got, want = np.empty(k, np.uint32), np.empty(k, np.uint32)
    cpu.top_k(x, k, got)
    reference.top_k(x, k, want)
    np.testing.assert_array_equal(got, want)
    return read / x.size


def test_top_k_reads_its_input_three_times_at_most(monkeypatch):
    """Once where a sample tells the threshold, twice where it misleads, three times where much is kept."""
    found = {}
    for name, x in zip(("spread", "rounded", "one place", "constant", "not finite"), _long_inputs(), strict=True):
        for k in (100, 1000, 50_000):
            with monkeypatch.context() as patch:
                found[name, k] = _reads(patch, x.astype(np.float32), k)
    assert found["spread", 100] == found["spread", 1000] == 1
    assert max(reads for (_, k), reads in found.items() if k < 50_000) <= 2
    assert max(found.values()) == 3
    rising = np.arange(100_003, dtype=np.float32)
    assert _reads(monkeypatch, rising, 1000) <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_take_and_scatter_agree(dtype, index_type):
    x = next(gradients(dtype, 1025))
    indices = np.arange(3, 1025, 7).astype(index_type)

    def call(kernels):
        values, own_values = empty(indices.size, "float32"), empty(indices.size, "float32")
        residual, own = random_normal(1025), random_normal(1025, seed=1)
        kernels.take(x, indices, values, residual)
        kernels.take(own, indices, own_values, own)
        out, added, summed = random_normal(1025), random_normal(1025), empty(1025, "float32")
        kernels.scatter(indices, values, out)
        kernels.scatter(indices, values, added, accumulate=True)
        kernels.scatter_sum([indices, indices[5:]], [values, own_values[5:]], summed)
        return [values, residual, own_values, own, out, added, summed]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_what_is_taken_leaves_the_residual(kernels):
    x = random_normal(500)
    indices, values, dense = np.empty(50, np.uint32), np.empty(50, np.float32), np.empty(500, np.float32)
    kernels.top_k(x, 50, indices)
    residual = x.copy()
    kernels.take(residual, indices, values, residual)
    kernels.scatter_sum([indices], [values], dense)
    np.testing.assert_array_equal(residual + dense, x)
    assert not residual[indices].any()


@pytest.mark.parametrize("count", [0, 1, 300, 30_000], ids=["none", "one", "one tile", "many tiles"])
def test_lists_of_all_ranks_add_up_in_their_order(count):
    size, rng = 3 * 32_768 + 5, np.random.default_rng(count)
    indices = [np.sort(rng.choice(size, count, replace=False)).astype(np.uint32) for _ in range(3)]
    values = [rng.standard_normal(count, np.float32) for _ in indices]

    def call(kernels):
        out = np.full(size, np.nan, np.float32)  # all of it is written
        kernels.scatter_sum(indices, values, out)
        return [out]

    assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 33, 200])
def test_check_indices(kernels, index_type, length):
    indices = np.arange(5, 5 + 2 * length, 2).astype(index_type)
    last = int(indices[-1])
    assert kernels.check_indices(indices, last + 1)
    assert not kernels.check_indices(indices, last)
    assert kernels.check_indices(indices[:0], 0)
    for place in range(1, length):
        for wrong in (indices[place - 1], 0, indices[place] + 2):
            changed = indices.copy()
            changed[place] = wrong
            grown = wrong == indices[place] + 2 and place == length - 1
            assert kernels.check_indices(changed, last + 3) == grown


@pytest.mark.parametrize("kernels", BACKENDS)
def test_negative_indices_are_refused(kernels):
    assert not kernels.check_indices(np.array([-1, 3], np.int64), 10)
    assert not kernels.check_indices(np.array([0, 2**32 - 1], np.uint32), 10)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_wrong_arguments_are_refused(kernels):
    x, indices = np.zeros(5, np.float32), np.zeros(6, np.uint32)
    with pytest.raises(ValueError, match="Expected k from 0 to 5, got 6"):
        kernels.top_k(x, 6, indices)
    with pytest.raises(ValueError, match="Expected indices of 3 elements, got 6"):
        kernels.top_k(x, 3, indices)
    with pytest.raises(ValueError, match="Expected values of 6 elements, got 5"):
        kernels.take(x, indices, x)


def test_backends_have_the_same_functions():
    for name in reference.__all__:
        assert getattr(cpu, name).__module__ == getattr(reference, name).__module__.replace("reference", "cpu")
