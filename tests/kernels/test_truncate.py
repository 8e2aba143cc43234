from __future__ import annotations

import numpy as np
import pytest

from gradwire.kernels import cpu, reference
from gradwire.kernels.float_format import FORMATS, as_bits
from tests.kernels.samples import BACKENDS, LENGTHS, assert_backends_agree, gradients, random_normal

DTYPES = ["float32", "float16", "bfloat16"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_backend = pytest.mark.parametrize("kernels", BACKENDS)
NUMBERS = np.array([0.9, 0.01, 0.02, 0.03, 0.1, 0.005, 1.5, 1e-8], np.float32)


@each_dtype
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_truncate_alike(dtype, length):
    for x in gradients(dtype, length):
        limits = np.abs(random_normal(length, seed=1)) * np.float32(1e4)
        limits[::5], limits[1::7] = np.inf, np.nan
        for guard, levels in ((1.0, 3), (4.25, 2), (1e-3, 3), (1e-3, 1)):

            def call(kernels, x=x, limits=limits, guard=guard, levels=levels):
                out = np.empty_like(x)
                kernels.truncate_floats(x, limits, guard, out, levels)
                return [as_bits(out)]

            assert_backends_agree(call)


@each_dtype
@pytest.mark.parametrize("length", [0, 1, 63, 65, 5003])
@pytest.mark.parametrize("moments", [(False, False), (True, False), (False, True), (True, True)])
def test_backends_agree_on_limits(dtype, length, moments):
    for parameter in gradients(dtype, length):
        first, second = (next(gradients(dtype, length)) if there else None for there in moments)
        if second is not None:
            second = as_bits(second) & np.array(np.iinfo(as_bits(second).dtype).max >> 1, as_bits(second).dtype)
            second = second.view(parameter.dtype)

        def call(kernels, parameter=parameter, first=first, second=second):
            out = np.empty(length, np.float32)
            kernels.update_limits(parameter, first, second, NUMBERS, out)
            return [out]

        assert_backends_agree(call)


@each_backend
def test_bits_are_cut_by_levels_where_the_limit_allows(kernels):
    x = np.full(6, 1.0 + 2.0**-23 + 2.0**-10 + 2.0**-3, np.float32)
    limits = np.array([2.0**6, 2.0**6 * 1.2, 2.0**12 * 1.2, 2.0**18 * 1.2, 0.0, np.nan], np.float32)
    out = np.empty_like(x)
    kernels.truncate_floats(x, limits, 1.0, out)
    cut = [x[0], 1 + 2.0**-10 + 2.0**-3, 1 + 2.0**-10 + 2.0**-3, 1 + 2.0**-3, x[0], x[0]]
    assert out.tolist() == pytest.approx(cut, abs=0)
    kernels.truncate_floats(x, limits * 4, 4.0, out)
    assert out.tolist() == pytest.approx(cut, abs=0)
    kernels.truncate_floats(x, limits, 1.0, out, levels=1)
    assert out.tolist() == pytest.approx([x[0], cut[1], cut[1], cut[1], x[0], x[0]], abs=0)


@each_dtype
@each_backend
def test_a_cut_changes_less_than_its_share_of_the_limit(kernels, dtype):
    """|x − x'| · guard ≤ limit · 2^-mantissa, on which the bound of an update rests; also for subnormal numbers."""
    for x in gradients(dtype, 3000):
        limits = np.abs(random_normal(3000, seed=2)) * np.float32(2.0) ** np.random.default_rng(0).integers(
            -140, 20, 3000
        )
        limits = limits.astype(np.float32)
        out = np.empty_like(x)
        kernels.truncate_floats(x, limits, 3.0, out)
        before, after = (reference_values(each) for each in (x, out))
        finite = np.isfinite(before)
        off = np.abs(before[finite] - after[finite]) * 3.0
        assert (off <= limits[finite].astype(np.float64) * 2.0 ** -FORMATS[x.dtype].mantissa).all()
        assert (as_bits(x)[~finite] == as_bits(out)[~finite]).all()


def reference_values(x: np.ndarray) -> np.ndarray:
    wide = np.empty(x.size, np.float32)
    reference.cast(x, wide)
    return wide.astype(np.float64)


@each_backend
def test_what_is_cut_to_nothing_is_plus_zero_and_what_is_not_cut_keeps_its_sign(kernels):
    x = np.array([-0.0, -1e-44, -0.0, -1e-44], np.float32)
    out = np.empty_like(x)
    kernels.truncate_floats(x, np.array([1, 1, 0, 0], np.float32), 1.0, out)
    assert out.view(np.uint32).tolist() == [0, 0, *x[2:].view(np.uint32).tolist()]


@each_backend
def test_limits_are_those_of_plain_sgd(kernels):
    out = np.empty(3, np.float32)
    numbers = np.array([1, 0.5, 0, 0, 0.25, 0, 1, 0], np.float32)
    kernels.update_limits(np.array([2, -4, 0], np.float32), None, None, numbers, out)
    assert out.tolist() == [4, 8, 0]


@each_backend
def test_a_first_moment_that_pulls_toward_zero_takes_off_and_one_that_pulls_away_does_not_add(kernels):
    out = np.empty(4, np.float32)
    numbers = np.array([1, 0, 0.5, 0, 1, 0, 1, 0], np.float32)
    theta, moment = np.array([2, 2, -2, 2], np.float32), np.array([1, -1, -1, 9], np.float32)
    kernels.update_limits(theta, moment, None, numbers, out)
    assert out.tolist() == [1.5, 2, 1.5, 0]


@each_backend
def test_a_second_moment_divides(kernels):
    out = np.empty(2, np.float32)
    numbers = np.array([1, 0, 0, 0, 1, 0, 4, 1], np.float32)
    kernels.update_limits(np.array([2, 2], np.float32), None, np.array([1, 0], np.float32), numbers, out)
    assert out.tolist() == [6, 2]


@each_backend
def test_wrong_sizes_are_refused(kernels):
    x, limits = np.ones(3, np.float32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="Expected limits of 3 elements, got 2"):
        kernels.truncate_floats(x, limits, 1.0, x)
    with pytest.raises(ValueError, match="Expected first of 3 elements, got 2"):
        kernels.update_limits(x, limits, None, NUMBERS, np.empty(3, np.float32))


def test_x_may_be_written_over():
    x = random_normal(1000)
    out, limits = np.empty_like(x), np.full(1000, 1e6, np.float32)
    cpu.truncate_floats(x, limits, 2.0, out)
    cpu.truncate_floats(x, limits, 2.0, x)
    assert x.tobytes() == out.tobytes()
