"""Inputs for kernel tests, and the comparison of backends."""

from collections.abc import Callable, Iterator

import numpy as np

from gradwire.kernels import cpu, reference

DTYPES = ["float32", "float64", "float16", "bfloat16"]
LENGTHS = [0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 319, 320, 321, 1023, 1024, 1025, 5003]
BACKENDS = [cpu, reference]

# Zeros, largest finite, smallest normal and subnormal, and what carries into infinity when rounded to float16.
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-45, 65520.0, 0.5],
    np.float32,
)


def random_normal(length: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed float32 with some exact zeros."""
    rng = np.random.default_rng([length, seed])
    values = rng.standard_normal(length) * np.exp(rng.standard_normal(length))
    values[rng.random(length) < 0.1] = 0
    return values.astype(np.float32)


def in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values converted to an element type of kernels."""
    if dtype == "bfloat16":
        out = np.empty(values.size, np.uint16)
        reference.cast(values, out)
        return out
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def empty(length: int, dtype: str) -> np.ndarray:
    return np.empty(length, np.uint16 if dtype == "bfloat16" else dtype)


def gradients(dtype: str, length: int) -> Iterator[np.ndarray]:
    """Random values, the same with special values inserted, and constants of both signs."""
    values = random_normal(length)
    yield in_dtype(values, dtype)
    strewn = values.copy()
    strewn[:: max(1, length // 40)] = np.resize(SPECIAL, strewn[:: max(1, length // 40)].size)
    yield in_dtype(strewn, dtype)
    yield in_dtype(np.full(length, -0.37, np.float32), dtype)
    yield in_dtype(np.full(length, -0.0, np.float32), dtype)


def assert_same(actual: object, expected: object) -> None:
    """Assert the same type and bits. All NaNs are equal."""
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.dtype == want.dtype
    if got.dtype.kind == "f":
        nans = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nans)
        got, want = np.where(nans, 0, got), np.where(nans, 0, want)
        got, want = got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}")
    np.testing.assert_array_equal(got, want)


def assert_backends_agree(call: Callable[..., list[object]]) -> None:
    """Assert that `call`, which takes a backend and returns results and buffers, gives the same for every backend."""
    got, want = call(cpu), call(reference)
    assert len(got) == len(want)
    for actual, expected in zip(got, want, strict=True):
        assert_same(actual, expected)
