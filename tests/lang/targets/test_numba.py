"""Generated Numba code compared with the oracle: the same bytes, residuals and tensors, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.lang import cache, interpret
from gradwire.lang.emit import statics
from gradwire.lang.interpret import Environment
from gradwire.lang.ir import Program
from gradwire.lang.operators.arithmetic import static_values
from gradwire.lang.targets import numba
from tests.lang import algorithms

KEYS = np.array([11, 12, 13, 14], np.uint32)
OFFSET = 3
SIZES = (0, 1, 5, 63, 64, 65, 1000, 1024, 1025, 5120, 5121, 30_000)
FAMILIES = ("normal", "zeros", "heavy", "largest")
each_algorithm = pytest.mark.parametrize("name", algorithms.names())


def environment(size: int) -> Environment:
    return Environment(size, 12 << 32 | 11, 14 << 32 | 13, OFFSET)


def gradient(size: int, family: str = "normal", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(size + seed)
    x = rng.standard_normal(size).astype(np.float32)
    if family == "zeros":
        x[:] = -0.0
    elif family == "heavy":
        x *= np.exp(3 * rng.standard_normal(size)).astype(np.float32)
        x[rng.random(size) < 0.3] = 0
    elif family == "largest" and size:
        x[rng.integers(size)], x[rng.integers(size)] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    return x


class Compiled:
    """The generated module of a program, called with arrays."""

    def __init__(self, program: Program) -> None:
        self.module = cache.load(f"test_{program.name}", numba.emit(program))
        self.statics = statics(program)

    def static(self, size: int) -> np.ndarray:
        return static_values(self.statics, size)

    def encode(self, x, scale=1.0, residual=None, rest=None, stats=None) -> np.ndarray | None:
        body, lists = np.empty(16 * x.size + 64, np.uint8), np.empty(20 * x.size + 128, np.uint8)
        arguments = (np.float32(scale), residual, rest, body, stats, KEYS, OFFSET, self.static(x.size), lists)
        length = self.module.encode(x, *arguments)
        return None if length < 0 else body[:length].copy()

    def decode(self, body, out, accumulate=None, stats=None) -> bool:
        room = np.empty(8 * out.size, np.uint8)
        return self.module.decode(body, out, accumulate, stats, KEYS, OFFSET, self.static(out.size), room)

    def decode_sum(self, bodies, out, stats=None) -> bool:
        places = np.array([body.ctypes.data for body in bodies], np.uint64)
        sizes = np.array([body.size for body in bodies], np.int64)
        room = np.empty(8 * len(bodies) * out.size, np.uint8)
        return self.module.decode_sum(places, sizes, out, stats, KEYS, OFFSET, self.static(out.size), room)


@each_algorithm
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_give_the_bytes_and_the_residual_of_the_oracle(name: str, family: str) -> None:
    program = algorithms.program(name)
    compiled = Compiled(program)
    for size in SIZES:
        x = gradient(size, family)
        for residual in (None, gradient(size, seed=1)):
            wanted = interpret.encode(program, x, environment(size), 0.5, residual)
            rest = np.empty(size, np.float32) if residual is None else residual.copy()
            body = compiled.encode(x, 0.5, None if residual is None else rest, rest)
            assert wanted is not None and body is not None
            assert body.tobytes() == wanted[0].tobytes(), size
            assert rest.tobytes() == wanted[1].tobytes(), size
            if residual is None:
                assert compiled.encode(x, 0.5).tobytes() == wanted[0].tobytes()


@each_algorithm
def test_decoders_give_the_tensor_of_the_oracle(name: str) -> None:
    program = algorithms.program(name)
    compiled = Compiled(program)
    for size in SIZES:
        body, _ = interpret.encode(program, gradient(size, "heavy"), environment(size))
        wanted = interpret.decode(program, body, environment(size))
        out, total = np.empty(size, np.float32), gradient(size)
        assert compiled.decode(body, out)
        assert out.tobytes() == wanted.tobytes(), size
        expected = total + wanted
        assert compiled.decode(body, total, True)
        assert np.array_equal(total, expected)
        each = [np.float32(0) + np.zeros(size, np.float32)]
        with np.errstate(over="ignore"):
            for _ in range(3):
                each[0] = each[0] + wanted
        assert compiled.decode_sum([body] * 3, out)
        assert np.array_equal(out, each[0])


@each_algorithm
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_not_encoded(name: str, bad: float) -> None:
    compiled = Compiled(algorithms.program(name))
    for size, place in ((1, 0), (700, 699), (5000, 1024)):
        x = gradient(size)
        x[place] = bad
        assert compiled.encode(x) is None
        assert compiled.encode(x, 1.0, np.zeros(size, np.float32), np.empty(size, np.float32)) is None


OTHER_TYPES = (np.float64, np.float16, np.uint16)


def of_other_types() -> list:
    """Each algorithm with one of the element types; `make ci` takes the others, for which it is compiled again."""
    return [
        pytest.param(name, dtype, marks=() if number % len(OTHER_TYPES) == place else pytest.mark.ci)
        for number, name in enumerate(algorithms.names())
        for place, dtype in enumerate(OTHER_TYPES)
    ]


@pytest.mark.parametrize(("name", "dtype"), of_other_types())
def test_other_element_types_are_read_as_float32(name: str, dtype: type) -> None:
    from gradwire.kernels.cpu.elements import as_input
    from gradwire.kernels.reference.elements import as_float32
    from gradwire.kernels.reference.sweep import cast

    compiled = Compiled(algorithms.program(name))
    x = np.empty(3000, dtype)
    cast(gradient(3000), x)
    assert compiled.encode(as_input(x)).tobytes() == compiled.encode(as_float32(x)).tobytes()


def test_given_stats_take_the_place_of_own_ones_and_do_not_travel() -> None:
    program = algorithms.program("shared_scale")
    compiled, x, stats = Compiled(program), gradient(2000), np.array([100.0], np.float32)
    wanted = interpret.encode(program, x, environment(2000), stats=[stats])
    body, alone = compiled.encode(x, stats=stats), compiled.encode(x)
    assert body.tobytes() == wanted[0].tobytes()
    # The scale itself is not sent but what is computed from it, which is a field of its own.
    assert body.size == alone.size
    out = np.empty(2000, np.float32)
    assert compiled.decode(body, out, stats=stats)
    assert np.abs(out - x).max() <= 100 / 2**20


def test_a_range_draws_what_the_whole_would_draw_there() -> None:
    program = algorithms.program("block_scales", block=128)
    module, x = Compiled(program).module, gradient(4096)

    def decoded(part: np.ndarray, first: int) -> np.ndarray:
        body, out, none = np.empty(2 * part.size, np.uint8), np.empty(part.size, np.float32), np.empty(0)
        length = module.encode(part, np.float32(1), None, None, body, None, KEYS, first, none, body)
        assert module.decode(body[:length], out, None, None, KEYS, first, none, body)
        return out

    whole = decoded(x, 0)
    for start in range(0, 4096, 384):
        part = x[start : start + 384].copy()
        assert np.array_equal(decoded(part, start), whole[start : start + 384])


@each_algorithm
def test_arbitrary_bytes_are_decoded_or_refused(name: str) -> None:
    program = algorithms.program(name)
    compiled, rng = Compiled(program), np.random.default_rng(0)
    size = 200
    right = interpret.encode(program, gradient(size), environment(size))[0].size
    for _ in range(300):
        any_size = not program.has_fixed_size
        body = rng.integers(0, 256, rng.integers(0, 2 * right) if any_size else right).astype(np.uint8)
        out = np.zeros(size, np.float32)
        if compiled.decode(body, out):
            assert np.isfinite(out).all() or program.items is not None


@pytest.mark.parametrize("name", ["quotients", "quotients_of_large"])
@pytest.mark.parametrize("family", FAMILIES)
def test_receivers_take_the_floats_of_every_finite_gradient(name: str, family: str) -> None:
    compiled = Compiled(algorithms.program(name))
    for size in SIZES:
        out = np.empty(size, np.float32)
        assert compiled.decode(compiled.encode(gradient(size, family)), out)
        assert np.isfinite(out).all()


def test_what_could_overflow_is_cut_to_the_finite_floats() -> None:
    program = algorithms.program("between")
    compiled = Compiled(program)
    body = compiled.encode(gradient(3000))
    largest = np.finfo(np.float32).max
    body[:8].view(np.float32)[:] = largest, largest
    out, twice = np.empty(3000, np.float32), np.empty(3000, np.float32)
    assert compiled.decode(body, out)
    assert (out == largest).all()
    assert compiled.decode_sum([body, compiled.encode(np.zeros(3000, np.float32))], twice)
    assert (twice == largest).all()
