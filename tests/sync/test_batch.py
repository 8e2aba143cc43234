"""Fusion groups in compiled calls: the bits of tensors one by one, and blame for damage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.core.errors import SyncError
from gradwire.core.spec import ElementRange
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import BatchCodec
from gradwire.sync.chunk import Chunk
from gradwire.sync.fusion_codec import FusionCodec
from gradwire.sync.plan_entry import PlanEntry
from tests.sync.fusion_groups import group_of


def codec_of(method: str, rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[BatchCodec, Chunk]:
    """The codec of two tensors in one chunk."""
    group = group_of([(0, 300), (1, 300)], PlanEntry(make(method), feedback=make(method).default_feedback), dtype)
    compiled = BatchCodec.compiled_of(group, Residuals())
    assert compiled is not None
    codec = BatchCodec(group, Residuals(), rank, 2, 0, compiled)
    (chunk,) = group.layout.chunks(1)
    return codec, chunk


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["onebit", "threelc", "topk"])
def test_other_element_types_are_rounded_once(method: str, dtype: torch.dtype) -> None:
    codec, chunk = codec_of(method, dtype=dtype)
    single = FusionCodec(codec.group, Residuals(), 0, 2, 0)
    one, other = codec.start(chunk), single.start(chunk)
    assert one.body.tobytes() == other.body.tobytes() and one.flags == other.flags
    codec.decode_sum(chunk, [one, one])
    found = [each.clone() for each in codec.group.tensors]
    single.decode_sum(chunk, [one, one])
    assert all(map(torch.equal, found, codec.group.tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["onebit", "threelc", "topk", "int8"])
def test_velocities_are_those_of_tensors_one_by_one(method: str, dtype: torch.dtype) -> None:
    """Over three steps, the second of which is rolled back; the other tensor is unused in the third."""
    entry = PlanEntry(make(method), "allgather", feedback="momentum:masking=False")
    group = group_of([(0, 300), (1, 70)], entry, dtype)
    (chunk,) = group.layout.chunks(1)
    states = Residuals(), Residuals()
    for step in range(3):
        group.step, group.used = step, [True, step < 2]
        for index, tensor in enumerate(group.tensors):
            tensor.copy_(torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(10 * step + index)))
        compiled = BatchCodec.compiled_of(group, states[0])
        assert compiled is not None
        one = BatchCodec(group, states[0], 0, 2, 0, compiled).start(chunk)
        other = FusionCodec(group, states[1], 0, 2, 0).start(chunk)
        assert one.body.tobytes() == other.body.tobytes() and one.flags == other.flags
        for state in states:
            state.rollback() if step == 1 else state.commit()
    one, other = (state.state_dict() for state in states)
    assert set(one) == set(other) and "velocity" in one
    for role in ("local", "velocity"):
        assert {name: list(each) for name, each in one[role].items()} == {
            name: list(each) for name, each in other[role].items()
        }
        for name, slices in one[role].items():
            assert all(torch.equal(values, other[role][name][offset]) for offset, values in slices.items())


def test_velocities_go_one_by_one_where_compiled_calls_lack_something() -> None:
    def is_compiled(feedback: str, method: str = "onebit", strategy: str = "allgather") -> bool:
        group = group_of([(0, 300)], PlanEntry(make(method), strategy, feedback=feedback))
        return BatchCodec.compiled_of(group, residuals) is not None

    residuals = Residuals()
    assert is_compiled("momentum") and is_compiled("momentum", "int8") and is_compiled("momentum:masking=False", "topk")
    for option in ("nesterov=True", "clip=1.0"):
        assert not is_compiled(f"momentum:{option}")
    assert not is_compiled("momentum", "topk")  # masking
    residuals.add(ResidualKey("t0", ElementRange(0, 300)), np.ones(300, np.float32))
    assert not is_compiled("momentum", "int8"), "a residual of an earlier plan is sent, too"


def test_a_gradient_that_is_not_finite_marks_its_tensor_and_the_mean() -> None:
    codec, chunk = codec_of("onebit")
    codec.group.tensors[1][7] = torch.inf
    sent = codec.start(chunk)
    assert sent.nonfinite and sent.used
    mean = codec.merge(chunk, [sent], 1)
    assert mean.nonfinite
    codec.decode(chunk, [mean], 1)
    assert codec.group.nonfinite
    assert codec.group.tensors[1].isnan().all() and codec.group.tensors[0].isfinite().all()


@pytest.mark.parametrize("damage", ["cut", "longer", "length", "unused length", "values"])
def test_a_damaged_message_is_blamed_on_its_sender(damage: str) -> None:
    codec, chunk = codec_of("onebit")
    good = codec.start(chunk)
    body = good.body.copy()
    if damage == "cut":
        body = body[:5]
    elif damage == "longer":
        body = np.append(body, np.uint8(0))
    elif damage == "length":
        body[0] -= 1
    elif damage == "unused length":
        body[3] = 0
    else:
        body[8:12] = np.array([np.nan], "<f4").view(np.uint8)
    bad = replace(good, body=body, sender=1)
    for use in (lambda: codec.merge(chunk, [good, bad], 1), lambda: codec.decode_sum(chunk, [good, bad])):
        with pytest.raises(SyncError, match="Rank 1 sent bytes that are not a payload"):
            use()
