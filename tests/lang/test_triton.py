"""Generated Triton code compared with the oracle: the same bytes, residuals and tensors, bit for bit.

Without a GPU the kernels are interpreted, which is slow and shows no races.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gradwire.kernels import reference
from gradwire.lang import cache, concat, interpret, trace
from gradwire.lang.emit import statics
from gradwire.lang.ir import Program
from gradwire.lang.operators.arithmetic import static_values
from gradwire.lang.operators.base import Sink
from gradwire.lang.targets import triton
from tests.lang import algorithms
from tests.lang.targets.test_numba import KEYS, OFFSET, environment, gradient

SIZES = (0, 1, 65, 1025, 5121)
LARGE = (30_000, 1_100_000)
each_algorithm = pytest.mark.parametrize("name", algorithms.names())


def _not_interpreted(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles in this process, as there is a GPU: it does not interpret.")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    _not_interpreted(request.param)
    return request.param


class Generated:
    """The generated module of a program, called with NumPy arrays."""

    def __init__(self, program: Program, device: str) -> None:
        self.module = cache.load(f"test_{program.name}_triton", triton.emit(program))
        self.statics, self.device = statics(program), device

    def static(self, size: int) -> np.ndarray:
        return static_values(self.statics, size)

    def tensor(self, x: np.ndarray | None) -> torch.Tensor | None:
        return None if x is None else torch.from_numpy(x.copy()).to(self.device)

    def encode(self, x, scale=1.0, residual=None, rest=None, stats=None, first=OFFSET) -> np.ndarray | None:
        """Encode, and write the residual to `rest`. A gradient may be a torch tensor."""
        grad = x.to(self.device) if isinstance(x, torch.Tensor) else self.tensor(x)
        kept = self.tensor(rest)
        residual = kept if residual is rest else self.tensor(residual)
        arguments = (self.tensor(stats), KEYS, first, self.static(grad.numel()))
        body = self.module.encode(grad, float(scale), residual, kept, *arguments)
        if rest is not None:
            rest[:] = kept.cpu().numpy()
        return None if body is None else body.cpu().numpy()

    def decode(self, body, out, accumulate=None, stats=None, first=OFFSET) -> bool:
        tensor = self.tensor(out)
        static = self.static(out.size)
        found = self.module.decode(self.tensor(body), tensor, accumulate, self.tensor(stats), KEYS, first, static)
        out[:] = tensor.cpu().numpy()
        return found

    def decode_sum(self, bodies, out) -> bool:
        tensor, bodies = self.tensor(out), [self.tensor(body) for body in bodies]
        found = self.module.decode_sum(bodies, tensor, None, KEYS, OFFSET, self.static(out.size))
        out[:] = tensor.cpu().numpy()
        return found


def sizes(device: str) -> tuple[int, ...]:
    return SIZES if device == "cpu" else SIZES + LARGE


@each_algorithm
def test_encoders_give_the_bytes_and_the_residual_of_the_oracle(name: str, device: str) -> None:
    program = algorithms.program(name)
    generated = Generated(program, device)
    for size in sizes(device):
        x = gradient(size, "heavy")
        for residual in (None, gradient(size, seed=1)):
            wanted = interpret.encode(program, x, environment(size), 0.5, residual)
            rest = np.empty(size, np.float32) if residual is None else residual.copy()
            body = generated.encode(x, 0.5, None if residual is None else rest, rest)
            assert wanted is not None and body is not None
            assert body.tobytes() == wanted[0].tobytes(), size
            assert rest.tobytes() == wanted[1].tobytes(), size


@pytest.mark.ci
@each_algorithm
@pytest.mark.parametrize("family", ["zeros", "largest", "subnormal"])
def test_encoders_without_a_residual_give_the_bytes_of_the_oracle(name: str, family: str, device: str) -> None:
    program = algorithms.program(name)
    x = gradient(1100, family) if family != "subnormal" else gradient(1100) * np.float32(1e-40)
    wanted = interpret.encode(program, x, environment(1100))
    assert Generated(program, device).encode(x).tobytes() == wanted[0].tobytes()


def test_equal_magnitudes_meet_in_slots_as_in_the_oracle(device: str) -> None:
    program = algorithms.program("hashed")
    x = np.rint(gradient(3000, "heavy"))
    wanted = interpret.encode(program, x, environment(3000))
    assert wanted is not None
    assert Generated(program, device).encode(x).tobytes() == wanted[0].tobytes()


def test_nothing_is_written_to_a_table_without_slots(device: str) -> None:
    from gradwire.lang.targets.triton.runtime import flag, hash_numbers, launch

    program, x = algorithms.program("hashed", ratio=0.0), gradient(1000)
    generated, behind = Generated(program, device), torch.full((4,), -(2**63), device=device)
    grad, floats = generated.tensor(x), torch.empty(1, dtype=torch.float64, device=device)
    # The kernel with a table of no slots; `behind` stands for the memory at its end.
    launch(
        *(generated.module.encode_0, (1,), 1000, grad, 1.0, None, flag(grad), None, behind, hash_numbers(KEYS, grad)),
        *(0, floats, flag(grad)),
    )
    assert (behind == -(2**63)).all()
    wanted = interpret.encode(program, x, environment(1000))
    assert wanted is not None
    assert generated.encode(x).tobytes() == wanted[0].tobytes()


@each_algorithm
def test_decoders_give_the_tensor_of_the_oracle(name: str, device: str) -> None:
    program = algorithms.program(name)
    generated = Generated(program, device)
    for size in sizes(device):
        bodies = [interpret.encode(program, gradient(size, "heavy", s), environment(size))[0] for s in range(3)]
        wanted = [interpret.decode(program, body, environment(size)) for body in bodies]
        out, total = np.empty(size, np.float32), gradient(size)
        expected = total + wanted[0]
        assert generated.decode(bodies[0], out)
        assert out.tobytes() == wanted[0].tobytes(), size
        assert generated.decode(bodies[0], total, True)
        assert np.array_equal(total, expected), size
        assert generated.decode_sum(bodies, out)
        assert np.array_equal(out, np.float32(0) + wanted[0] + wanted[1] + wanted[2]), size


@each_algorithm
def test_a_gradient_that_is_not_finite_is_not_encoded(name: str, device: str) -> None:
    generated = Generated(algorithms.program(name), device)
    for size, place, bad in ((1, 0, np.nan), (1500, 1024, -np.inf)):
        x = gradient(size)
        x[place] = bad
        assert generated.encode(x) is None
        assert generated.encode(x, 1.0, np.zeros(size, np.float32), np.empty(size, np.float32)) is None


@pytest.mark.ci
@each_algorithm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_element_types_are_read_as_float32(name: str, dtype: torch.dtype, device: str) -> None:
    generated = Generated(algorithms.program(name), device)
    x = torch.from_numpy(gradient(1100)).to(dtype)
    assert generated.encode(x).tobytes() == generated.encode(x.float()).tobytes()


@pytest.mark.parametrize("first", [0, 2048, 1000])
def test_a_range_draws_what_the_whole_would_draw_there(first: int, device: str) -> None:
    program = algorithms.program("ternary")
    x, env = gradient(6000), environment(6000)
    env.offset = first
    wanted = interpret.encode(program, x, env)[0]
    assert Generated(program, device).encode(x, first=first).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("block", [8, 1024, 1500, 70_000])
def test_blocks_of_any_size(block: int, device: str) -> None:
    program = algorithms.program("block_norms", block=block)
    x = gradient(6000)
    wanted = interpret.encode(program, x, environment(6000))[0]
    assert Generated(program, device).encode(x).tobytes() == wanted.tobytes()


def test_sums_of_more_than_1024_chunks(device: str) -> None:
    from gradwire.kernels.reference.reduce import block_sum64
    from gradwire.lang.targets.triton.runtime import finish_sum

    parts = np.random.default_rng(0).standard_normal((2, 2100))
    found = finish_sum(torch.from_numpy(parts).to(device)).cpu().numpy()
    assert found.tobytes() == np.array([block_sum64(row) for row in parts]).tobytes()


def test_given_stats_take_the_place_of_own_ones(device: str) -> None:
    program = algorithms.program("shared_scale")
    generated, x, stats = Generated(program, device), gradient(2000), np.array([100.0], np.float32)
    wanted = interpret.encode(program, x, environment(2000), stats=[stats])
    body, out = generated.encode(x, stats=stats), np.empty(2000, np.float32)
    assert body.tobytes() == wanted[0].tobytes()
    assert generated.decode(body, out, stats=stats)
    assert np.abs(out - x).max() <= 100 / 2**20
    assert generated.encode(x, stats=np.array([np.inf], np.float32)) is None


def test_the_preliminary_round_measures_what_the_oracle_does(device: str) -> None:
    program = algorithms.program("shared_scale")
    generated, x = Generated(program, device), gradient(2000)

    def measured(grad: np.ndarray) -> list[float]:
        return generated.module.measure(
            generated.tensor(grad), 0.5, None, KEYS, OFFSET, generated.static(grad.size)
        ).tolist()  # fmt: skip

    assert measured(x) == [float(each) for each in interpret.statistics(program, x, environment(2000), 0.5)]
    x[7] = np.nan
    assert measured(x) == [np.inf]


@each_algorithm
def test_arbitrary_bytes_are_decoded_or_refused(name: str, device: str) -> None:
    program, rng, size = algorithms.program(name), np.random.default_rng(0), 200
    generated = Generated(program, device)
    right = interpret.encode(program, gradient(size), environment(size))[0].size
    for _ in range(8):
        body = rng.integers(0, 256, right).astype(np.uint8)
        out = np.zeros(size, np.float32)
        if generated.decode(body, out):
            assert np.isfinite(out).all() or program.items is not None
    assert not generated.decode(rng.integers(0, 256, right + 1).astype(np.uint8), np.zeros(size, np.float32))


def test_a_position_outside_the_gradient_makes_a_payload_invalid(device: str) -> None:
    generated, out = Generated(algorithms.program("sampled"), device), np.zeros(10, np.float32)
    positions = np.empty(reference.positions_bytes(10, 2), np.uint8)
    reference.pack_positions(np.array([3, 9], np.uint32), 10, positions)
    start = np.uint32(2).tobytes() + np.array([1, 2], np.float32).tobytes()
    assert generated.decode(np.frombuffer(start + positions.tobytes(), np.uint8), out)
    assert out.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 2]
    positions[1] = 1 << 12 - 8  # position 12 in place of 9, in a bitmap
    assert not generated.decode(np.frombuffer(start + positions.tobytes(), np.uint8), out)


def test_names_of_the_runtime_cannot_be_fields() -> None:
    from gradwire.lang.targets.triton import names, runtime

    assert all(callable(getattr(runtime, name)) for name in names.RUNTIME)
    p = trace("p", lambda g: concat(start=g.reduce(min), chunk=g), lambda p: p.chunk * p.start, {})
    assert [each.variable for each in p.fields] == ["start_", "chunk_"]


def test_an_operator_without_source_for_gpus_says_so() -> None:
    class Other(Sink):
        name = "other"
        infer = reference = cpu = None  # type: ignore[assignment]

    with pytest.raises(NotImplementedError, match=r"'other' has no source for GPUs\. Implement its method `triton`"):
        Other().triton(None, "", "", "")


@pytest.mark.parametrize("position", [-1.0, 1.0, 7.0, np.nan, np.inf])
def test_items_at_positions_that_only_the_device_knows(position: float, device: str) -> None:
    from gradwire.lang.targets.triton.runtime import item

    values = torch.arange(3.0, device=device)
    at = torch.tensor(position, dtype=torch.float64, device=device)
    assert item(values, at).item() == (0.0 if np.isnan(position) else min(max(position, 0.0), 2.0))
    assert item(values[:0], at).item() == 0.0


def test_importing_gradwire_does_not_import_triton() -> None:
    code = "import sys, gradwire, gradwire.lang, gradwire.lang.targets.triton; print('triton' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
