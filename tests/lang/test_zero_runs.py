"""Zero runs: the bytes are those of 3LC on every backend, and no others are accepted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.kernels import reference
from gradwire.lang import interpret, mean, sign, trit, uint1
from gradwire.lang.ir import Program
from gradwire.lang.operators.base import Coding, Operator, coding_of, used_operators
from tests.kernels.test_zero_run import PIECES
from tests.lang.targets.test_numba import Compiled, environment, gradient
from tests.lang.test_trace import concat, traced
from tests.lang.test_triton import Generated
from tests.lang.test_types import digits

BACKENDS: dict[str, Callable[[Program], Compiled | Generated]] = {
    "cpu": Compiled,
    "triton": lambda program: Generated(program, "cuda" if torch.cuda.is_available() else "cpu"),
}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def signs() -> Program:
    return traced(
        lambda g: concat(q=g.map(sign, dtype=trit).zero_runs(), low=g.reduce(min)), lambda p: p.q * (1 + p.low)
    )


def spike(size: int = 700) -> np.ndarray:
    """A gradient whose first element only is not 0."""
    x = np.zeros(size, np.float32)
    x[0] = 1
    return x


@pytest.mark.parametrize("size", [0, 1, 5, 70, 699, 5120, 5121, 12_000])
def test_the_oracle_shortens_what_it_would_have_sent(size: int) -> None:
    x = np.trunc(gradient(size) / 1.5)
    packed = digits(np.sign(x))
    out = np.empty_like(packed)
    expected = out[: reference.zero_run_encode(packed, out)]
    body, rest = interpret.encode(signs(), x, environment(size))
    assert body.tobytes() == np.float32(x.min(initial=0)).tobytes() + expected.tobytes()
    assert np.array_equal(rest, x - interpret.decode(signs(), body, environment(size)))


@each_backend
def test_runs_are_cut_into_longest_ones(backend: str) -> None:
    body = BACKENDS[backend](signs()).encode(spike())
    assert list(body) == [0, 0, 0, 0, 121 + 81, *[255] * 9, 254]  # 139 bytes of zeros, 14 a token


WRONG = {
    "nothing": b"",
    "half a scalar": bytes(3),
    "no trits": bytes(4),
    "a byte of trits too few": bytes([0, 0, 0, 0, 202, *[255] * 9, 253]),
    "a byte of trits too many": bytes([0, 0, 0, 0, 202, *[255] * 10]),
    "a token too few": bytes([0, 0, 0, 0, 202, *[255] * 9]),
    "a byte behind the last token": bytes([0, 0, 0, 0, 202, *[255] * 9, 254, 0]),
    "a run that is cut otherwise": bytes([0, 0, 0, 0, 202, 254, *[255] * 9]),
    "zeros that are not shortened": bytes([0, 0, 0, 0, 202, *[121] * 139]),
    "many more tokens than bytes": bytes([0, 0, 0, 0, *[255] * 5000]),
    "a scalar that is not finite": bytes([0, 0, 128, 127, 202, *[255] * 9, 254]),
}


@each_backend
def test_what_no_encoder_writes_is_refused(backend: str) -> None:
    decoder, right, size = BACKENDS[backend](signs()), BACKENDS[backend](signs()).encode(spike()), 700
    assert decoder.decode(right, np.empty(size, np.float32))
    assert decoder.decode_sum([right] * 2, np.empty(size, np.float32))
    for name, data in WRONG.items():
        body = np.frombuffer(data, np.uint8).copy()
        assert not decoder.decode(body, np.empty(size, np.float32)), name
        assert not decoder.decode(body, np.zeros(size, np.float32), True), name
        assert not decoder.decode_sum([right, body, right], np.empty(size, np.float32)), name
    for other in (694, 701, 0):
        assert not decoder.decode(right, np.empty(other, np.float32)), other


@each_backend
def test_what_travels_beside_them_need_not_have_a_fixed_place(backend: str) -> None:
    """A scalar of the preliminary round is left out where there was one, and the runs follow on what is there."""

    def encode(g):
        scale = abs(g).reduce(mean).over_ranks(max)
        q = g.map(sign, dtype=trit)
        return concat(q=q.zero_runs(), scale=scale, low=g.reduce(min), up=g.map(lambda x: x > 1, dtype=uint1))

    program, size, stats = traced(encode, lambda p: p.q * p.scale + p.up), 700, np.array([3], np.float32)
    code, x = BACKENDS[backend](program), np.trunc(gradient(size) / 2)
    for own, other in ((None, stats), (stats, None)):
        entries = () if own is None else [own]
        wanted = interpret.encode(program, x, environment(size), stats=entries)
        body, out = code.encode(x, stats=own), np.empty(size, np.float32)
        assert body.tobytes() == wanted[0].tobytes()
        assert code.decode(body, out, stats=own)
        assert out.tobytes() == interpret.decode(program, body, environment(size), entries).tobytes()
        assert not code.decode(body, out, stats=other)  # as if the runs began 4 bytes from where they do
        assert not code.decode(body[: 3 + 88], out, stats=own)


def test_fields_come_in_the_order_in_which_they_can_be_found() -> None:
    program = traced(
        lambda g: concat(q=g.map(dtype=trit).zero_runs(), up=g.map(lambda x: x > 1, dtype=uint1), low=g.reduce(min)),
        lambda p: p.q + p.low,
    )
    assert [each.name for each in program.fields] == ["low", "up", "q"]
    assert [each.coding is not None for each in program.fields] == [False, False, True]
    assert not program.has_fixed_size
    assert "zero_runs" in used_operators(program)
    assert traced(lambda g: concat(q=g.map(dtype=trit))).has_fixed_size


# -- the torch functions of the GPU backend, which need no GPU --------------------------------------------------------


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b"abc" + data, np.uint8).copy())


def _expanded(data: bytes, size: int) -> bytes | None:
    from gradwire.lang.targets.triton.host import expand_runs

    found = expand_runs(_tensor(data), 3, size)
    if found is None:
        return None
    data = found.numpy().tobytes()
    assert data[:3] == b"abc"
    return data[3:]


def _by_the_reference(data: bytes, size: int) -> bytes | None:
    found = coding_of(signs().fields[-1]).expand(np.frombuffer(data, np.uint8), size)
    return None if found is None else found.tobytes()


@given(data=PIECES)
@example(data=b"")
@example(data=bytes([121] * 28))
def test_runs_on_a_device_are_those_of_the_reference(data: bytes) -> None:
    from gradwire.lang.targets.triton.host import shorten_runs

    wanted = coding_of(signs().fields[-1]).shorten(np.frombuffer(data, np.uint8)).tobytes()
    assert shorten_runs(_tensor(data), 3).numpy().tobytes() == b"abc" + wanted
    assert _expanded(wanted, len(data)) == data
    assert _expanded(wanted, len(data) + 1) is None
    assert len(data) == 0 or _expanded(wanted, len(data) - 1) is None


@given(data=st.lists(st.sampled_from([0, 120, 121, 122, 242, 243, 244, 254, 255]), max_size=60).map(bytes))
@example(data=bytes([255] * 60))
def test_a_device_takes_what_the_reference_takes(data: bytes) -> None:
    whole = sum(max(1, byte - 241) for byte in data)
    for size in {len(data), whole, whole + 1, max(0, whole - 1)}:
        assert _expanded(data, size) == _by_the_reference(data, size)


def test_a_body_that_ends_before_the_runs_begin_is_refused_on_a_device() -> None:
    from gradwire.lang.targets.triton.host import expand_runs

    assert expand_runs(torch.zeros(2, dtype=torch.uint8), 3, 0) is None


def test_a_coding_without_source_for_gpus_says_so() -> None:
    class Other(Coding):
        name = "other_coding"
        infer = shorten = expand = cpu_shorten = cpu_expand = None  # type: ignore[assignment]

    assert isinstance(Other(), Operator)
    with pytest.raises(NotImplementedError, match=r"'other_coding' has no source for GPUs\. Implement its method"):
        Other().triton_shorten("body", "at")
    with pytest.raises(NotImplementedError, match=r"'other_coding' has no source for GPUs"):
        Other().triton_expand("body", "at", "size")
