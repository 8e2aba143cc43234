"""Compressors of the registry on a GPU, or interpreted on the CPU: the bytes and tensors of their code for the CPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gradwire import compressors
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec

CODECS = [
    codec
    for codec in (*(compressors.make(name) for name in compressors.names()), compressors.make("ternary", zero_run=True))
    if isinstance(codec, TracedCompressor)
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
SIZE = 3000


def gradient(seed: int = 0, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def context(rank: int = 0) -> Context:
    return Context("layer.weight", step=3, rank=rank, world_size=2, seed=5, spec=TensorSpec((SIZE,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles in this process, as there is a GPU")
@each_codec
def test_generated_code_for_gpus_gives_the_payloads_of_that_for_the_cpu(codec: TracedCompressor) -> None:
    grad, work = gradient(), gradient(1)
    rest, device = work.clone(), codec.on_device
    payload = codec.encode(grad, context(), scale=0.5, residual_in=work.numpy(), residual_out=work.numpy())
    body = device.encode(grad, context(), scale=0.5, residual_in=rest, residual_out=rest)
    assert body.numpy().tobytes() == payload.body.tobytes()
    assert torch.equal(rest, work)
    out = torch.empty(SIZE)
    assert device.decode([body], context(), out)
    assert torch.equal(out, codec.decode(payload, context()))
    assert device.decode([body, body], context(), out)
    assert torch.equal(out, codec.decode_sum([payload] * 2, [context()] * 2, torch.empty(SIZE)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles in this process, as there is a GPU")
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.program.stats], ids=repr)
def test_values_of_the_preliminary_round_are_used_on_gpus_as_on_the_cpu(codec: TracedCompressor) -> None:
    grad = gradient()
    shared = [np.stack([stat.values for stat in each]).max(0) for each in zip(
        codec.stats(grad, context()), codec.stats(gradient(1), context(1)), strict=True)]  # fmt: skip
    given = torch.from_numpy(np.concatenate(shared))
    payload = codec.encode(grad, context(), stats=shared)
    body = codec.on_device.encode(grad, context(), stats=given)
    assert body is not None and body.numpy().tobytes() == payload.body.tobytes()
    out = torch.empty(SIZE)
    assert codec.on_device.decode([body], context(), out, stats=given)
    assert torch.equal(out, codec.decode(payload, context(), stats=shared))


def test_without_triton_a_gpu_gets_advice() -> None:
    code = """
import sys
sys.modules["triton"] = None
from gradwire import compressors
try:
    compressors.make("minmax").on_device.module
except ModuleNotFoundError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "minmax on a GPU needs Triton" in found.stdout
    assert "Run pip install 'gradwire[gpu]'." in found.stdout


@pytest.mark.gpu
@each_codec
def test_gradients_and_outputs_on_a_gpu(codec: TracedCompressor) -> None:
    grads, ctxs = [gradient(k) for k in range(2)], [context(rank) for rank in range(2)]
    stats = [entry.values for entry in codec.stats(grads[0].cuda(), ctxs[0])]
    for found, entry in zip(stats, codec.stats(grads[0], ctxs[0])):
        assert np.array_equal(found, entry.values)
    payloads = [codec.encode(grad, ctx) for grad, ctx in zip(grads, ctxs)]
    for grad, ctx, payload in zip(grads, ctxs, payloads):
        assert codec.encode(grad.cuda(), ctx).body.tobytes() == payload.body.tobytes()
    for dtype in (torch.float32, torch.bfloat16):
        out = codec.decode(payloads[0], ctxs[0], out=torch.empty(SIZE, dtype=dtype, device="cuda"))
        assert torch.equal(out.cpu(), codec.decode(payloads[0], ctxs[0], out=torch.empty(SIZE, dtype=dtype)))
    total = codec.decode_sum(payloads, ctxs, torch.empty(SIZE, device="cuda"))
    assert torch.equal(total.cpu(), codec.decode_sum(payloads, ctxs, torch.empty(SIZE)))


@pytest.mark.gpu
@each_codec
def test_residuals_of_gradients_on_a_gpu(codec: TracedCompressor) -> None:
    works = [gradient(1).numpy().copy() for _ in range(2)]
    payloads = [
        codec.encode(grad, context(), residual_in=work, residual_out=work)
        for grad, work in zip((gradient(), gradient().cuda()), works)
    ]
    assert payloads[0].body.tobytes() == payloads[1].body.tobytes()
    assert works[0].tobytes() == works[1].tobytes()


@pytest.mark.gpu
def test_what_is_not_finite_or_not_a_payload_is_told_on_a_gpu() -> None:
    codec = compressors.make("onebit")
    grad = gradient().cuda()
    body = codec.encode(grad, context()).body.copy()
    grad[7] = torch.nan
    marked = codec.encode(grad, context())
    assert marked.nonfinite
    assert codec.decode(marked, context(), out=torch.empty(SIZE, device="cuda")).isnan().all()
    body[:4] = 255
    with pytest.raises(PayloadError, match="finite values"):
        codec.decode(type(marked)(body), context(), out=torch.empty(SIZE, device="cuda"))
