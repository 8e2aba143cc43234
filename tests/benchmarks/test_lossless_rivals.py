"""The benchmark with zstd, zlib and ZipNN: the parts that need none of them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from benchmarks.micro import lossless_rivals

from gradwire.bench.extras import MissingPackageError
from gradwire.core.spec import ElementRange
from gradwire.ddp.optimizer_state import OptimizerState


@pytest.mark.parametrize("name", ["zstd -3", "ZipNN"])
def test_the_rivals_are_asked_for_by_the_extra_that_brings_them(monkeypatch, name) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'gradwire\[bench\]'"):
        lossless_rivals.method_of(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_figures_are_those_of_the_payloads_and_every_tensor_is_compared(dtype) -> None:
    tensors = [lossless_rivals.Tensor(torch.randn(size).to(dtype), {}) for size in (100, 3000)]
    for name in ("lossless", "gcomp", "gcomp:levels=sent, threads", "zlib -1"):
        method = lossless_rivals.method_of(name)
        assert method.threads == ("threads" in name)
        ratio, encodes, decodes = lossless_rivals.measured(method, tensors, repeats=2)
        assert 0.5 < ratio < 1
        assert len(encodes) == len(decodes) == 2
    wrong = lossless_rivals.rival("wrong", lambda data, _: data, lambda data, _: data[:-1])
    with pytest.raises(AssertionError, match="wrong gave another tensor"):
        lossless_rivals.measured(wrong, tensors, repeats=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_of_16_bits_has_gradient_parameter_and_state_of_16_bits(dtype) -> None:
    grad = 1e-6 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.randn(3000, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = grad
    optimizer.step()
    aux = OptimizerState(optimizer, [("w", parameter)])("w", ElementRange(0, 3000))
    (tensor,) = lossless_rivals.cast([lossless_rivals.Tensor(grad, aux)], dtype)
    assert {tensor.grad.dtype, tensor.aux["parameter"].dtype, tensor.aux["first"].dtype} == {dtype}
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    assert tensor.aux["loss_scale"] == scale
    assert torch.equal(tensor.grad, (grad * scale).to(dtype))
    rates = {
        name: lossless_rivals.measured(lossless_rivals.ours(name), [tensor], 1)[0] for name in lossless_rivals.OURS
    }
    # The parameters are a million times as large.
    assert rates["gcomp"] <= rates["gcomp:levels=sent"] < rates["lossless"] - 0.1


def test_rows_have_ratio_and_both_rates() -> None:
    found = [lossless_rivals.Figure("its own", 8, "float32", "lossless", 0.84, [1.0, 3.0, 2.0], [4.0, 5.0, 6.0])]
    rows = list(lossless_rivals.figures(found, 10))
    assert [(row["metric"], row["value"]) for row in rows] == [("ratio", 0.84), ("encode", 2.0), ("decode", 5.0)]
    assert "lossless" in lossless_rivals.table(rows)


def test_methods_that_the_record_has_are_not_measured_again() -> None:
    assert list(lossless_rivals.run(methods="lossless;gcomp", done={("lossless",), ("gcomp",)})) == []
