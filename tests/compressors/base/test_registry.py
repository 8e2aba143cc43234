"""Names, options, wire numbers, and what the errors advise."""

from __future__ import annotations

from typing import ClassVar

import google_crc32c
import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.compressors.base import registry
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError
from gradwire.kernels.prefix_code import PrefixCode
from gradwire.wire.payload import Payload


@pytest.fixture
def registered():
    """Registers classes for one test."""
    known = set(compressors.names())
    yield compressors.register
    for name in set(compressors.names()) - known:
        registry.unregister(name)


def user_compressor(name: str, **members) -> type[Compressor]:
    def encode(self, grad, ctx, stats=(), *, scale=1.0, residual_in=None, residual_out=None):
        return Payload(np.empty(0, np.uint8))

    def decode(self, payload, ctx, out=None, accumulate=False, stats=()):
        return self._output(ctx, out).zero_()

    body = {"name": name, "encode": encode, "decode": decode, "max_encoded_bytes": lambda self, spec: 0, **members}
    return type(f"User{name}", (Compressor,), body)


def test_the_issue_s_names_are_there() -> None:
    assert {"none", "fp16", "bf16", "int8", "onebit", "topk", "threelc"} <= set(compressors.names())
    assert compressors.names() == sorted(compressors.names())


def test_unknown_names_list_the_known_and_the_closest() -> None:
    with pytest.raises(UnknownNameError, match=r"compressor 'tokp'\. Did you mean 'topk'\? Known: adacomp, bf16, dgc"):
        compressors.make("tokp")
    with pytest.raises(UnknownNameError, match=r"option of topk 'ration'\. Did you mean 'ratio'\? Known: ratio"):
        compressors.make("topk", ration=0.1)
    with pytest.raises(UnknownNameError, match="option of none 'ratio'"):
        compressors.make("none", ratio=0.1)
    for ask in (compressors.code, compressors.describe):
        with pytest.raises(UnknownNameError, match="Unknown compressor 'zip'"):
            ask("zip")


@pytest.mark.parametrize(
    ("name", "options", "error", "advice"),
    [
        ("topk", {"ratio": 0}, OptionError, "0 < ratio <= 1, but is 0"),
        ("topk", {"ratio": 1.5}, OptionError, "ratio must be in the range 0 < ratio <= 1, but is 1.5"),
        ("topk", {"ratio": float("nan")}, OptionError, "but is nan"),
        ("topk", {"ratio": "1%"}, TypeError, "ratio must be a number, not '1%'"),
        ("topk", {"ratio": True}, TypeError, "ratio must be a number, not True"),
        ("minmax", {"bits": True}, TypeError, "bits must be an integer from 1 to 8, not True"),
        ("minmax", {"bits": 4.0}, TypeError, "bits must be an integer from 1 to 8, not 4.0"),
        ("minmax", {"bits": 3}, OptionError, "bits must be 1, 2, 4 or 8, not 3"),
        ("gcomp", {"rate": 1}, TypeError, "rate must be one of 'current', 'lasting', not 1"),
        ("gcomp", {"rate": "last"}, OptionError, "rate must be one of 'current', 'lasting', not 'last'"),
        ("threelc", {"sparsity": 2.0}, OptionError, "1 <= sparsity < 2, but is 2.0"),
        ("threelc", {"sparsity": 0.99}, OptionError, "1 <= sparsity < 2, but is 0.99"),
        ("threelc", {"zero_run": 1}, TypeError, "zero_run must be True or False, not 1"),
        ("int8", {"block": 0}, OptionError, "block must be from 8 to 1048576, not 0"),
        ("int8", {"block": 64.0}, TypeError, "block must be an integer from 8 to 1048576, not 64.0"),
        ("int8", {"stochastic": None}, TypeError, "stochastic must be True or False, not None"),
    ],
)
def test_bad_options_say_what_is_expected(name, options, error, advice) -> None:
    with pytest.raises(error, match=advice):
        compressors.make(name, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    assert repr(compressors.make("topk", ratio=np.float64(0.25))) == "topk(ratio=0.25, warmup=0)"
    assert compressors.make("int8", block=np.int64(64)).options["block"] == 64


def test_options_with_the_name_make_the_same_compressor_again() -> None:
    codec = compressors.make("threelc", sparsity=1.5, zero_run=False)
    again = compressors.make(codec.name, **codec.options)
    assert repr(again) == repr(codec) == "threelc(block=0, sparsity=1.5, zero_run=False)"


def test_a_text_option_may_look_like_a_number() -> None:
    counts = np.zeros(256, np.int64)
    counts[:32] = 1
    table = PrefixCode.of(counts).to_bytes().hex()
    assert registry.parse_option(f"table={table}", "lossless")[1] != table, "or this test needs another table"
    codec = compressors.make("lossless", table=table)
    assert compressors.make(registry.spec_of(codec)).options == codec.options


def test_options_may_be_part_of_the_name() -> None:
    assert repr(compressors.make("topk:ratio=0.25")) == "topk(ratio=0.25, warmup=0)"
    assert repr(compressors.make("topk:ratio=0.25", warmup=8)) == "topk(ratio=0.25, warmup=8)"
    assert compressors.make("threelc:sparsity=1.5:zero_run=false").options["zero_run"] is False
    with pytest.raises(OptionError, match=r"An option of topk is given twice, in 'topk:ratio=0\.25'"):
        compressors.make("topk:ratio=0.25", ratio=0.5)
    with pytest.raises(UnknownNameError, match=r"option of topk 'ration'\. Did you mean 'ratio'\?"):
        compressors.make("topk:ration=0.25")
    with pytest.raises(OptionError, match=r"'ratio' \(of 'topk:ratio'\) is not NAME=VALUE"):
        compressors.make("topk:ratio")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (["topk"], "Pass 'topk'."),
        (torch.float16, "Pass 'fp16'."),
        (torch.bfloat16, "Pass 'bf16'."),
        (compressors.topk.TopK, r"Make one: topk\(\)\."),
        (0.01, 'Pass "topk:ratio=0.01", for example. Names: adacomp, bf16'),
        (None, "neither a compressor nor the name of one: None"),
    ],
)
def test_what_is_no_compressor_is_told_what_to_pass(given, advice) -> None:
    for ask in (compressors.make, registry.compressor_of):
        with pytest.raises(OptionTypeError, match=advice):
            ask(given)


def test_describe_tells_summary_options_and_algebra() -> None:
    found = compressors.describe("int8")
    assert found.summary.endswith(".")
    assert found.options == {"block": 1024, "stochastic": True}
    assert found.default.unbiased
    assert found.code == compressors.code("int8")


def test_wire_numbers_are_hashes_of_names_and_differ() -> None:
    codes = {name: compressors.code(name) for name in compressors.names()}
    assert len(set(codes.values())) == len(codes)
    assert codes["topk"] == google_crc32c.value(b"topk") & 0xFFFF == 19930
    assert all(0 < number < 1 << 16 for number in codes.values())


def test_a_user_s_compressor_works_like_any_other(registered) -> None:
    @registered
    class Vanish(user_compressor("vanish")):
        """Sends nothing."""

        name: ClassVar[str] = "vanish"

        def __init__(self, depth: int = 1) -> None:
            self.depth = depth

    codec = compressors.make("vanish", depth=3)
    assert codec.depth == 3
    assert compressors.describe("vanish").summary == "Sends nothing."
    assert codec.encode(torch.ones(3), Context("w")).body.nbytes == 0
    with pytest.raises(UnknownNameError, match="Known: depth"):
        compressors.make("vanish", deep=3)


def test_a_class_may_replace_its_older_self_but_no_other(registered) -> None:
    registered(user_compressor("mine"))
    newer = registered(user_compressor("mine"))
    assert type(compressors.make("mine")) is newer
    with pytest.raises(ValueError, match=r"The name 'topk' is taken by gradwire\.compressors\.topk\.TopK"):
        registered(user_compressor("topk"))


def test_two_names_with_one_wire_number_are_refused(registered) -> None:
    taken, name = compressors.code("none"), ""
    for index in range(1 << 20):
        name = f"c{index}"
        if google_crc32c.value(name.encode()) & 0xFFFF == taken:
            break
    with pytest.raises(ValueError, match=r"wire number .*'none'\. Choose another name"):
        registered(user_compressor(name))
    assert name not in compressors.names()


@pytest.mark.parametrize("name", ["Top", "top-k", "", "3lc", None])
def test_names_are_identifiers_in_lower_case(registered, name) -> None:
    with pytest.raises(ValueError, match="is no name of a compressor"):
        registered(user_compressor(name))


def test_other_things_are_refused(registered) -> None:
    with pytest.raises(TypeError, match=r"is not a subclass of gradwire\.Compressor"):
        registered(dict)
    with pytest.raises(TypeError, match=r"The option 'level' of .* has no default"):
        registered(user_compressor("strict", __init__=lambda self, level: None))
