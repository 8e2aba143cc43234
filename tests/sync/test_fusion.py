"""Fusion of small compressed tensors changes only how they travel."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.compressors.base.registry import code, make
from gradwire.core.errors import FrameError, PayloadError, SyncError
from gradwire.core.events import Event
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync import fusion
from gradwire.sync.chunk import Chunk
from gradwire.sync.fusion import FusionGroup, FusionLayout, is_fused, rotations
from gradwire.sync.fusion_codec import FusionCodec, split
from gradwire.sync.job import TensorLayout
from gradwire.sync.plan import Method, Plan
from gradwire.sync.plan_entry import MAX_RANGE_ELEMENTS, PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.wire.frame import FrameKind, Header
from gradwire.wire.payload import Payload
from tests.sync.fusion_groups import group_of
from tests.sync.harness import ranks

SHAPES = {"a": (40, 30), "b": (70, 100), "c": (3, 5), "d": (128, 64), "e": (50, 50)}


def gradient(rank: int, step: int, name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1000 * step + 10 * rank + ord(name)))


def train(one: Synchronizer, together: bool, steps: int = 3, unused: str = "") -> dict[str, Any]:
    """Return means of the last step, residuals, and messages of all steps, with one submission or one per tensor."""
    frames, received = [], Counter[str]()

    def count(event: Event) -> None:
        if event.kind == "send":
            frames.append(event.nbytes)
        elif event.kind == "recv":
            received[event.detail["phase"]] += 1

    one.events.listen(count)
    for step in range(steps):
        grads = {name: gradient(one.rank, step, name) for name in SHAPES}
        one.begin_step()
        slices = [
            GradientSlice(name, grad, used=not (name == unused and one.rank == 1)) for name, grad in grads.items()
        ]
        for group in [slices] if together else [[each] for each in slices]:
            one.submit(group)
        one.commit()
    found = {"means": grads, "residuals": one.residuals.total(), "received": received}
    return found | {"frames": len(frames), "bytes": sum(frames)}


@pytest.mark.parametrize("unused", ["", "b"])
@pytest.mark.parametrize(
    "method",
    [
        "onebit", "threelc", "topk", make("threelc", zero_run=False, sparsity=1.5), make("topk", ratio=0.2, warmup=2),
        "qsgd", "int8", make("randomk", ratio=0.1), "adacomp", "powersgd", "int8shared", "signsgd", "terngrad", "thc",
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_by_all_gather_gives_the_bits_of_its_tensors_one_by_one(
    method: Method, world_size: int, unused: str
) -> None:
    plan = Plan(method, min_elements=0, strategy="allgather")
    found = []
    for together in (True, False):
        with ranks(world_size, plan) as group:
            found.append(group.each(partial(train, together=together, unused=unused)))
    for fused, single in zip(*found, strict=True):
        for name in SHAPES:
            assert torch.equal(fused["means"][name], single["means"][name])
            np.testing.assert_array_equal(fused["residuals"].get(name), single["residuals"].get(name))
        assert fused["frames"] * len(SHAPES) == single["frames"]
        assert fused["bytes"] < single["bytes"]


@pytest.mark.parametrize("unused", ["", "b"])
@pytest.mark.parametrize("method", ["powersgd", "signsgd", "terngrad", "thc"])
def test_a_group_by_scatter_reduce_shares_a_preliminary_round(method: str, unused: str) -> None:
    """With error feedback, a rank's residual counts in the statistics of what it encodes, but not of what it adds."""
    plan = Plan(method, min_elements=0, strategy="scatter_reduce", feedback="error")
    found, world_size, steps = [], 3, 3
    for together in (True, False):
        with ranks(world_size, plan) as group:
            found.append(group.each(partial(train, together=together, steps=steps, unused=unused)))
    for rank, (fused, single) in enumerate(zip(*found, strict=True)):
        for name in SHAPES:
            assert torch.equal(fused["means"][name], single["means"][name])
            np.testing.assert_array_equal(fused["residuals"].get(name), single["residuals"].get(name))
        num_owned = len(range(rank, len(SHAPES), world_size)) if method == "powersgd" else len(SHAPES)
        num_others = world_size - 1 if method == "powersgd" else 0  # owners whose results a rank receives
        assert fused["received"]["recv stats"] == steps * (world_size - 1)
        assert single["received"]["recv stats"] == num_owned * steps * (world_size - 1)
        assert fused["received"]["recv reduced stats"] == steps * num_others
        assert single["received"]["recv reduced stats"] == steps * (len(SHAPES) - num_owned)


@pytest.mark.parametrize("strategy", ["allgather", "scatter_reduce"])
def test_powersgd_has_the_same_bits_fused_or_not_and_continues_from_either(strategy: str) -> None:
    """With two partitions, its tensors are not fused, and not cut either."""
    plans = [Plan("powersgd", min_elements=0, strategy=strategy, partitions=count) for count in (1, 2)]
    found, specs = [], {name: TensorSpec(shape) for name, shape in SHAPES.items()}
    for fused in (0, 1):
        with ranks(3, plans[fused], tensors=specs) as group:
            before = group.each(partial(train, together=True, unused="b"))
            saved = [one.state_dict() for one in group.synchronizers]
        with ranks(3, plans[1 - fused], tensors=specs) as group:
            for one, state in zip(group.synchronizers, saved, strict=True):
                one.load_state_dict(state)
            after = group.each(partial(train, together=True))
        assert set(saved[0]["residuals"]["states"]) == set(SHAPES) - {"c"}  # its factors would take more bytes
        found.append((before, after))
    (before, after), (before_other, after_other) = found
    for one, other in zip([*before, *after], [*before_other, *after_other], strict=True):
        for name in SHAPES:
            assert torch.equal(one["means"][name], other["means"][name])
            np.testing.assert_array_equal(one["residuals"].get(name), other["residuals"].get(name))
    assert before[0]["frames"] < before_other[0]["frames"]


@pytest.mark.parametrize("method", ["onebit", "topk", "powersgd", make("int8shared", stochastic=False)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_by_scatter_reduce_replicas_agree_and_nothing_is_lost(method: Method, world_size: int) -> None:
    plan = Plan(method, min_elements=0, strategy="scatter_reduce")
    steps, totals = 12, []

    def run(one: Synchronizer) -> dict[str, torch.Tensor]:
        sums = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in SHAPES}
        for step in range(steps):
            grads = {name: gradient(one.rank, step, name) for name in SHAPES}
            one.begin_step()
            one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
            one.commit()
            for name, grad in grads.items():
                sums[name] += grad
        totals.append(one.residuals.total())
        return sums

    with ranks(world_size, plan) as group:
        found = group.each(run)
    for name in SHAPES:
        assert all(torch.equal(found[0][name], other[name]) for other in found)
        true = sum(gradient(rank, step, name).double() for rank in range(world_size) for step in range(steps))
        held = sum(total[name] for total in totals if name in total)
        total = found[0][name].flatten().numpy() + held
        np.testing.assert_allclose(total, true.flatten().numpy() / world_size, atol=1e-4)


def test_which_tensors_are_fused() -> None:
    onebit = PlanEntry(make("onebit"), "scatter_reduce", 1, "error")
    assert is_fused(onebit, 100)
    assert is_fused(onebit, MAX_RANGE_ELEMENTS)
    assert not is_fused(onebit, MAX_RANGE_ELEMENTS + 1)
    for other in ("int8shared", "signsgd", "powersgd"):  # summable, preliminary rounds, full tensors
        assert is_fused(PlanEntry(make(other), partitions=1), 100)
    assert not is_fused(PlanEntry(make("none"), partitions=1), 100)
    assert not is_fused(replace(onebit, strategy="ring"), 100)
    for partitions in (2, None):
        assert not is_fused(replace(onebit, partitions=partitions), 100)


def test_without_costs_a_plan_takes_tensors_of_up_to_131072_elements_whole() -> None:
    plan = Plan("onebit")
    assert [plan.entry("w", TensorSpec((numel, 1))).partitions for numel in (2_000, 1 << 17, (1 << 17) + 1)] == [
        1, 1, None,
    ]  # fmt: skip
    assert Plan("powersgd").entry("w", TensorSpec(((1 << 17) + 1, 2))).partitions == 1  # never cut
    for unfused in (Plan("onebit", strategy="ring"), Plan("powersgd", strategy="ring"), Plan("none")):
        assert unfused.entry("w", TensorSpec((2_000, 1))).partitions is None
    assert Plan("onebit", partitions=3).entry("w", TensorSpec((2_000, 1))).partitions == 3


def test_owners_rotate_among_tensors_that_are_cut_equally() -> None:
    whole, two, all_ranks = (PlanEntry(make("onebit"), partitions=count) for count in (1, 2, None))
    assert rotations([(whole, 10), (two, 10), (whole, 10), (all_ranks, 10), (two, 10), (whole, 10)]) == [
        0, 0, 1, 0, 1, 2,
    ]  # fmt: skip
    # A tensor that is too large for a message with others does not make one of these skip a rank.
    assert rotations([(whole, 10), (whole, 1 << 30), (whole, 10)]) == [0, 0, 1]


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 9])
def test_chunks_hold_each_tensor_once_and_its_owner_is_the_same_in_every_group(num_chunks: int) -> None:
    entry = PlanEntry(make("onebit"))
    tensors = list(enumerate([50, 400, 300, 200, 10, 90, 350]))
    owners = []
    for chosen in (tensors, tensors[2:5], tensors[:1]):
        group = group_of(chosen, entry)
        chunks = group.layout.chunks(num_chunks)
        assert sorted(index for chunk in chunks for index in group.members_of(chunk)) == list(range(len(chosen)))
        for chunk in (*chunks, group.layout.whole):
            assert chunk.count == sum(chosen[index][1] for index in group.members_of(chunk))
        owners.append(
            {
                chosen[index][0]: (chunk.index + group.layout.rotation) % num_chunks
                for chunk in chunks
                for index in group.members_of(chunk)
            }
        )
    assert all(owners[0][name] == owner for some in owners[1:] for name, owner in some.items())


@pytest.fixture(scope="module")
def summed() -> tuple[list[FusionCodec], Chunk, dict[str, list[Payload]]]:
    """The codecs of two ranks for two tensors by powersgd, and the messages of each round."""
    entry = PlanEntry(make("powersgd"), feedback="error")
    members = [TensorLayout(f"t{index}", index, entry, torch.float32, 600, shape=(20, 30)) for index in range(2)]
    layout = FusionLayout(members)
    (chunk,) = layout.chunks(1)
    codecs = []
    for rank in range(2):
        values = [torch.randn(600, generator=torch.Generator().manual_seed(2 * rank + index)) for index in range(2)]
        codecs.append(FusionCodec(FusionGroup(layout, values, [True] * 2, 0, 0), Residuals(), rank, 2, 0))
    stats = [codec.stats(chunk) for codec in codecs]
    for codec in codecs:
        codec.reduce_stats(chunk, stats)
    payloads = [codec.start(chunk) for codec in codecs]
    sums = [codecs[0].encode_and_merge(chunk, payloads[1:], 1)]
    return codecs, chunk, {"reduce_stats": stats, "encode_and_merge": payloads, "decode": sums}


@pytest.mark.parametrize("damage", ["cut", "longer", "length", "too long"])
@pytest.mark.parametrize("call", ["reduce_stats", "encode_and_merge", "decode"])
def test_a_damaged_message_of_any_kind_is_blamed_on_its_sender(summed: Any, call: str, damage: str) -> None:
    codecs, chunk, messages = summed
    body = messages[call][-1].body.copy()
    if damage == "cut":
        body = body[:5]
    elif damage == "longer":
        body = np.append(body, np.uint8(0))
    elif damage == "length":
        body[0] -= 4
        body[4] += 4
    else:
        body = np.concatenate([body, np.zeros(4096, np.uint8)])
        body[5] += 16
    with pytest.raises(SyncError, match="Rank 1 sent bytes that are not a payload"):
        getattr(codecs[0], call)(chunk, [replace(messages[call][-1], body=body, sender=1)], 1)


def payload(lengths: list[int], size: int) -> Payload:
    table = np.array(lengths, "<u4").view(np.uint8)
    return Payload(np.concatenate([table, np.zeros(size, np.uint8)]), sender=1)


@pytest.mark.parametrize(("lengths", "size"), [([3, 4], 6), ([3, 4], 8), ([11, 0], 11), ([0xFFFFFFFF, 1], 0), ([3], 0)])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], size: int) -> None:
    with pytest.raises(PayloadError, match="Expected"):
        split(payload(lengths, size), [10, 10])


def test_headers_that_do_not_fit_are_refused() -> None:
    registry = TensorRegistry(Plan("onebit", min_elements=0), 2)
    registry.add({name: TensorSpec(shape) for name, shape in SHAPES.items()})
    numel = sum(TensorSpec(shape).numel for shape in SHAPES.values())
    good = {
        "kind": FrameKind.PAYLOAD, "compressor": code("onebit"), "dtype": ELEMENT_TYPES[torch.float32],
        "tensor": fusion.FUSION_FLAG | 1, "count": numel, "length": 1000, "sender": 1,
    }  # fmt: skip
    registry.admit(Header(**good))
    for wrong in (
        {"count": numel + 1}, {"length": 10_000_000}, {"tensor": fusion.FUSION_FLAG | 99}, {"offset": 8},
        {"compressor": code("topk")}, {"kind": FrameKind.STATS},
    ):  # fmt: skip
        with pytest.raises(FrameError, match="Expected"):
            registry.admit(Header(**{**good, **wrong}))


def test_headers_are_admitted_while_other_tensors_are_added() -> None:
    """A peer may send a tensor's message while this rank registers the next tensor."""
    registry = TensorRegistry(Plan("onebit", min_elements=0), 2)
    registry.add({"first": TensorSpec((40, 30))})
    header = Header(
        FrameKind.PAYLOAD, compressor=code("onebit"), dtype=ELEMENT_TYPES[torch.float32], tensor=fusion.FUSION_FLAG,
        count=1200, length=150, sender=1,
    )  # fmt: skip
    ended = threading.Event()

    def admit() -> int:
        count = 0
        while not ended.is_set():
            registry.admit(header)
            count += 1
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            admitted = pool.submit(admit)
            for index in range(100):
                registry.add({f"later{index}": TensorSpec((8, 8))})
            ended.set()
            assert admitted.result(60) > 0
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
def test_dense_tensors_have_the_same_bits_whatever_they_are_fused_with(strategy: str) -> None:
    """After a restart, the first buckets of DDP are others."""
    counts = {"a": 10, "b": 500, "c": 300}

    def means(one: Synchronizer, groups: list[str]) -> list[bytes]:
        one.register({name: TensorSpec((count,)) for name, count in counts.items()})
        generator = torch.Generator().manual_seed(one.rank)
        values = {name: torch.randn(count, generator=generator) for name, count in counts.items()}
        for names in groups:
            one.submit([GradientSlice(name, values[name]) for name in names]).wait()
        return [mean.numpy().tobytes() for mean in values.values()]

    found = []
    for groups in (["abc"], ["a", "b", "c"], ["ca", "b"]):
        with ranks(3, Plan("none", strategy=strategy)) as group:
            found += group.each(lambda one, groups=groups: means(one, groups))
    assert all(each == found[0] for each in found)
