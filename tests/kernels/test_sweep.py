import numpy as np
import pytest
import torch

from gradwire.core.spec import TensorSpec, as_array, as_tensor
from tests.kernels.samples import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    assert_backends_agree,
    empty,
    gradients,
    random_normal,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_compensate_agrees(dtype, length):
    residual = random_normal(length, seed=1)
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            out, alone, in_place = empty(length, "float32"), empty(length, "float32"), residual.copy()
            return [
                kernels.compensate(x, 0.3, residual, out),
                kernels.compensate(x, 0.7, None, alone),
                kernels.compensate(x, 0.3, in_place, in_place),
                out,
                alone,
                in_place,
            ]

        assert_backends_agree(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_advance_velocity_agrees(dtype, length):
    velocity = random_normal(length, seed=1)
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            out, in_place = empty(length, "float32"), velocity.copy()
            kernels.advance_velocity(x, 0.3, velocity, 0.9, out)
            kernels.advance_velocity(x, 0.3, in_place, 0.9, in_place)
            return [out, in_place]

        assert_backends_agree(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_accumulate_agrees(dtype, length):
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            out = random_normal(length, seed=1)
            kernels.accumulate(x, out)
            return [out]

        assert_backends_agree(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_weighted_sum_agrees_and_tells_what_is_finite(dtype, length):
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            other, out = x[::-1].copy(), empty(length, dtype)
            is_finite = kernels.weighted_sum([x, other, x], [0.25, 1.0, 0.5], out)
            in_place = x.copy()
            kernels.weighted_sum([in_place, other], [0.5, 0.5], in_place)
            with np.errstate(over="ignore"):
                as_floats = as_tensor(out, TensorSpec((length,), getattr(torch, dtype))).float()
            if dtype != "float64":
                assert is_finite == bool(as_floats.isfinite().all())
            return [int(is_finite), out, in_place]

        assert_backends_agree(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 17, 1025])
def test_cast_agrees(dtype, target, length):
    for x in gradients(dtype, length):

        def call(kernels, x=x):
            out, scaled = empty(length, target), empty(length, target)
            kernels.cast(x, out)
            kernels.cast(x, scaled, 0.37)
            if target == "bfloat16":  # the kinds of NaN differ, elsewhere assert_same sees to that
                out, scaled = (np.where((bits & 0x7FFF) > 0x7F80, 0x7FC0, bits) for bits in (out, scaled))
            return [out, scaled]

        assert_backends_agree(call)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_rounds_as_torch(kernels, dtype):
    # Every upper half of a float32 with lower halves on, below and above the tie.
    upper = np.arange(65536, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)])
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(dtype)
    out = np.empty(values.size, np.uint16 if dtype == torch.bfloat16 else np.float16)
    kernels.cast(values, out)
    got = as_tensor(out, TensorSpec((values.size,), dtype))
    assert torch.equal(got.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(got[finite].view(torch.int16), expected[finite].view(torch.int16))
    back = np.empty(values.size, np.float32)
    kernels.cast(out, back)
    np.testing.assert_array_equal(back, as_array(expected.float()))


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("dtype", ["uint16", "float16", "float32", "float64"])
def test_cast_copies_equal_types_bit_for_bit(kernels, dtype):
    unsigned = f"u{np.dtype(dtype).itemsize}"
    bits = np.random.default_rng(0).integers(0, 2**16, 4000).astype(unsigned)
    bits <<= bits.dtype.type(8 * bits.itemsize - 16)  # all signs and exponents, among them NaN of many kinds
    x = bits.view(dtype)
    out = np.empty_like(x)
    kernels.cast(x, out)
    np.testing.assert_array_equal(out.view(unsigned), bits)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 20, 36])
def test_compensate_reports_what_is_not_finite(kernels, bad, place):
    x = np.ones(37, np.float32)
    out = np.empty(37, np.float32)
    assert kernels.compensate(x, -2.0, x, out) == 1
    x[place] = bad
    assert np.isnan(kernels.compensate(x, 1.0, None, out))
    # An overflow of the sum shows as well.
    assert np.isnan(kernels.compensate(np.full(3, 3e38, np.float32), 2.0, None, out[:3]))


@pytest.mark.parametrize("kernels", BACKENDS)
def test_compensate_rounds_twice(kernels):
    # x * x - round(x * x) is 0 with two roundings, and not 0 with a fused one.
    x = np.float32(1 + 2**-12)
    residual = np.array([-(x * x)], np.float32)
    out = np.empty(1, np.float32)
    kernels.compensate(np.array([x]), float(x), residual, out)
    assert out[0] == 0


@pytest.mark.parametrize("kernels", BACKENDS)
def test_wrong_lengths_and_types_are_refused(kernels):
    x = np.ones(5, np.float32)
    with pytest.raises(ValueError, match="Expected out of 5 elements, got 4"):
        kernels.cast(x, np.empty(4, np.float32))
    with pytest.raises(ValueError, match="Expected residual of 5 elements, got 6"):
        kernels.compensate(x, 1.0, np.empty(6, np.float32), x)
    with pytest.raises(TypeError, match="Expected float32, float64, float16 or uint16"):
        kernels.accumulate(np.ones(5, np.int64), x)
