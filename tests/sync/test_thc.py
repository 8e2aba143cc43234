"""THC with the real strategies: only integers are added, and the mean is that of a sum in one place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.compressors.support.thc_tables import Table
from gradwire.compressors.thc import THC
from gradwire.core.context import Context
from gradwire.core.errors import DisagreementError, OptionError
from gradwire.core.spec import TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync.adding_codecs import make_codec
from gradwire.sync.chunk import Chunk, split
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.wire.frame import HEADER_BYTES
from tests.sync.harness import ranks

NUMEL, SEED = 9000, 3


def gradient(rank: int, step: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def exact_mean(codec: gw.Compressor, world_size: int, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of one step, computed in 64-bit accumulators in one place."""
    spec, scale = TensorSpec((NUMEL,)), 1 / world_size
    ctxs = [Context("w", step=1, rank=rank, world_size=world_size, seed=SEED, spec=spec) for rank in range(world_size)]
    if codec.default_feedback == "error":  # gradients are scaled as they are compensated
        grads, scale = [np.float32(scale) * grad for grad in grads], 1.0
    each = [codec.stats(grad, ctx, scale) for grad, ctx in zip(grads, ctxs, strict=True)]
    combine = {"max": np.maximum, "min": np.minimum}
    stats = [combine[rows[0].reduction].reduce([row.values for row in rows]) for rows in zip(*each, strict=True)]
    total = np.zeros(codec.accumulator_size(spec), np.int64)
    for grad, ctx in zip(grads, ctxs, strict=True):
        codec.accumulate(codec.encode(grad, ctx, stats, scale=scale), ctx, total)
    assert total.max() <= np.iinfo(codec.accumulator_dtype(world_size)).max
    narrow = total.astype(codec.accumulator_dtype(world_size))
    return codec.finalize(narrow, world_size, ctxs[0], stats, torch.empty(NUMEL))


def synchronized(
    world_size: int, strategy: str, codec: gw.Compressor, num_chunks: int, grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    def run(one: Synchronizer) -> torch.Tensor:
        one.begin_step()
        grad = grads[one.rank].clone()
        one.submit([GradientSlice("w", grad)])
        one.wait()
        one.commit()
        return grad

    plan = Plan({"w": codec}, strategy=strategy, partitions=num_chunks)
    with ranks(world_size, plan, seed=SEED, nodes=1) as group:
        group.each(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        return group.each(run)


@pytest.mark.parametrize(
    ("strategy", "is_cut"), [("scatter_reduce", True), ("scatter_reduce", False), ("ring", True), ("allgather", False)]
)
@pytest.mark.parametrize(
    "codec", [gw.make("thc"), gw.make("thc", granularity=90, bits=3, block=2048), gw.make("uthc")], ids=repr
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_strategy_gives_what_the_exact_integer_aggregate_gives(
    world_size: int, codec: gw.Compressor, strategy: str, is_cut: bool
) -> None:
    """Bit for bit, in accumulators of 8 and 16 bits: nothing was decoded, rounded or wrapped on the way."""
    grads = [gradient(rank) for rank in range(world_size)]
    found = synchronized(world_size, strategy, codec, world_size if is_cut else 1, grads)
    expected = exact_mean(codec, world_size, grads)
    for mean in found:
        assert torch.equal(mean, expected)
    exact = sum(grads) / world_size
    assert (expected - exact).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize(("codec", "accumulator_bits"), [
    (gw.make("thc", granularity=90, bits=3), [8, 16, 16]),
    (gw.make("thc", granularity=90, bits=3, accumulator_bits=32), [32] * 3),
    (gw.make("int8shared"), [16] * 3),
], ids=repr)  # fmt: skip
def test_accumulators_widen_from_hop_to_hop_of_a_ring(codec: gw.Compressor, accumulator_bits: list[int]) -> None:
    """Two values of 90 fit 8 bits, five do not: an aggregate is as wide as its own sum needs, and a header with another
    length is refused.
    """
    world_size, hops = 5, [1, 2, 4]  # a stage has as many payloads and one
    entry = PlanEntry(codec, "ring")
    assert [8 * entry.accumulator_dtype(stage, world_size).itemsize for stage in hops] == accumulator_bits
    assert 8 * PlanEntry(codec).accumulator_dtype(1, world_size).itemsize == accumulator_bits[-1], (
        "owners add all at once"
    )
    grads = [gradient(rank) for rank in range(world_size)]

    def run(one: Synchronizer) -> int:
        one.begin_step()
        one.submit([GradientSlice("w", grads[one.rank].clone())])
        one.wait()
        return one.report().total.sent_bytes

    with ranks(world_size, Plan({"w": codec}, strategy="ring"), seed=SEED, nodes=1) as group:
        group.each(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        sent = sum(group.each(run))
    chunks = [TensorSpec((chunk.count,)) for chunk in split(NUMEL, world_size)]
    stats = sum(4 * length for spec in chunks for length, _ in codec.stats_spec(spec))
    indices = sum(codec.max_encoded_bytes(spec) for spec in chunks) - stats
    widths = sum(entry.accumulator_dtype(stage, world_size).itemsize for stage in range(1, world_size - 1))
    widths += (world_size - 1) * entry.accumulator_dtype(world_size, world_size).itemsize  # the mean, once more round
    accumulators = sum(codec.accumulator_size(spec) for spec in chunks) * widths
    frames = HEADER_BYTES * world_size * (world_size - 1) * (world_size + 2)
    assert sent == (world_size * (world_size - 1)) * stats + indices + accumulators + frames


def test_sums_that_float32_would_round_are_refused_before_anything_is_sent() -> None:
    with ranks(3, Plan({"w": gw.make("thc", granularity=30, block=1 << 20)})) as group:
        found = group.outcomes(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        sent = [sum(transport.sent_bytes) for transport in group.network.transports]
    assert [type(error) for error in found] == [OptionError] * 3
    assert "does not add up exactly on 3 ranks" in str(found[0]) and "Pass block=262144" in str(found[0])
    assert sent == [0] * 3


def test_different_tables_are_found_before_anything_is_sent() -> None:
    """Equal options are not enough: tables are the result of a search, and a large one may come from disk."""

    class Other(THC):
        def table(self, world_size: int) -> Table:
            table = super().table(world_size)
            return replace(table, values=(0, 2, *table.values[2:]))

    with ranks(3, lambda rank: Plan({"w": (Other if rank == 1 else THC)(granularity=30)})) as group:
        found = group.outcomes(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        sent = [sum(transport.sent_bytes) for transport in group.network.transports]
    assert [type(error) for error in found] == [DisagreementError] * 3
    assert "table" in str(found[0]) and "rank 1" in str(found[0])
    assert sent == [0] * 3


@pytest.mark.parametrize("p", [None, 1 / 256])
def test_a_different_clamp_is_found_before_anything_is_sent(p: float | None) -> None:
    """It is found even where tables do not tell: those of evenly spaced values are the same for any p."""

    class Other(THC):
        def table(self, world_size: int) -> Table:
            table = super().table(world_size)
            return replace(table, p=table.p / 2) if p is None else table

    codecs = [THC(granularity=15, p=None), Other(granularity=15, p=p), THC(granularity=15, p=None)]
    assert len({codec.table(3).values for codec in codecs}) == 1
    with ranks(3, lambda rank: Plan({"w": codecs[rank]})) as group:
        found = group.outcomes(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        sent = [sum(transport.sent_bytes) for transport in group.network.transports]
    assert [type(error) for error in found] == [DisagreementError] * 3
    assert "rank 1" in str(found[0])
    assert sent == [0] * 3


def test_ranks_that_did_not_use_a_parameter_are_not_counted() -> None:
    """Sums are centered by the number of payloads in them, which is their last element."""
    codec, used, chunk = gw.make("thc", granularity=30), (True, False, True), Chunk(0, 0, NUMEL)
    codecs = []
    for rank, flag in enumerate(used):
        values = gradient(rank) if flag else torch.zeros(NUMEL)
        layout = TensorLayout("w", 0, PlanEntry(codec, feedback="none"), torch.float32, NUMEL)
        job = TensorJob(layout, values, 0, 1, flag)
        codecs.append(make_codec(job, Residuals(), rank, 3, seed=SEED))
    statistics = [each.stats(chunk) for each in codecs]
    for each in codecs:
        each.reduce_stats(chunk, statistics)
    total = codecs[0].encode_and_merge(chunk, [each.start(chunk) for each in codecs[1:]], 1)
    codecs[0].decode(chunk, [total], 1)
    exact = (gradient(0) + gradient(2)) / 3
    assert (codecs[0].job.values - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("strategy", ["scatter_reduce", "ring", "hierarchical"])
def test_nothing_is_lost_in_a_hundred_steps(strategy: str) -> None:
    """Produced = applied + residuals, with ranks that do not use the parameter in some steps."""
    world_size, numel = 4, 3000

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        produced, applied = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for step in range(100):
            one.begin_step()
            used = (step + one.rank) % 7 != 0
            grad = gradient(one.rank, step, numel) if used else torch.zeros(numel)
            produced += grad.double() / world_size
            one.submit([GradientSlice("w", grad, used=used)])
            one.wait()
            one.commit()
            applied += grad.double()
        held = torch.zeros(numel, dtype=torch.float64)
        for role in ("local", "aggregate"):
            for start, values in one.residuals.state_dict()[role].get("w", {}).items():
                held[int(start) : int(start) + values.numel()] += values.double()
        return produced, applied, held

    with ranks(world_size, Plan({"w": "thc"}, strategy=strategy)) as group:
        found = group.each(run)
    produced, held = sum(each[0] for each in found), sum(each[2] for each in found)
    assert all(torch.equal(each[1], found[0][1]) for each in found)
    assert 0 < held.norm() < 0.5 * produced.norm()
    assert torch.allclose(found[0][1] + held, produced, rtol=0, atol=1e-3 * float(produced.abs().max()))


def test_eight_bits_travel_back_at_eight_ranks() -> None:
    """Half a byte per element to the owner, one byte back: 8 times and 4 times less, as in the paper."""
    codec, spec = gw.make("thc"), TensorSpec((1 << 20,))
    there = codec.max_encoded_bytes(spec) - 4 * (1 << 10)  # norms travel in the preliminary round
    back = codec.accumulator_size(spec) * codec.accumulator_dtype(8).itemsize - 1
    assert (there, back) == (spec.nbytes // 8, spec.nbytes // 4)
