"""PowerSGD against the published algorithm, step by step, through every strategy; and its state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
import gradwire.compressors as compressors
from gradwire.compressors.powersgd import PowerSGD, orthonormal
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.planner.closed_forms import route
from gradwire.planner.costs import Costs, LinkCosts
from gradwire.planner.options import PlannedTensor, codec_for
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel
from gradwire.simulate import step as simulated_step
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.tuning.measure_codec import measure_codec
from tests.compressors.harness import sent
from tests.contracts.compressor_cases import context, heavy_tailed, normal, reduced, with_body
from tests.sync.harness import ANY, ranks

NAMES = ANY
SHAPES = {"wide": (24, 50), "tall": (60, 17), "convolution": (16, 5, 3, 3)}


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Gradients of ranks with different data: a constant part and noise."""
    stays = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))
    return stays + torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(one: Synchronizer, steps: range, shape: tuple[int, ...], spoilt: int | None = None) -> list[torch.Tensor]:
    """Means of several steps. In step `spoilt`, rank 1 has a NaN, and the step is rolled back."""
    means = []
    for step in steps:
        one.begin_step()
        grad = gradient(one.rank, step, shape)
        if step == spoilt and one.rank == 1:
            grad.view(-1)[3] = torch.nan
        one.submit([GradientSlice("w", grad)])
        one.wait()
        one.commit()
        means.append(grad)
    return means


def published(start: np.ndarray, grads: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Updates of algorithms 1 and 2 in float64, from gradients by step and rank and the first Q."""
    q = start.astype(np.float64)
    errors = [np.zeros(grad.shape) for grad in grads[0]]
    updates = []
    for by_rank in grads:
        deltas = [grad + error for grad, error in zip(by_rank, errors, strict=True)]
        p = np.linalg.qr(np.mean([delta @ q for delta in deltas], axis=0))[0]
        q = np.mean([delta.T @ p for delta in deltas], axis=0)
        updates.append(p @ q.T)
        errors = [delta - updates[-1] for delta in deltas]
    return updates


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(("world_size", "shape"), [(2, "wide"), (3, "tall"), (4, "convolution")])
def test_updates_are_those_of_the_paper_and_the_same_bits_on_all_ranks(
    strategy: str, world_size: int, shape: str
) -> None:
    dims = SHAPES[shape]
    with ranks(world_size, Plan({"w": gw.make("powersgd", rank=2)}, strategy=strategy)) as group:
        by_rank = group.each(lambda one: train(one, range(8), dims))
    for others in by_rank[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(by_rank[0], others, strict=True))

    def matrix(grad: torch.Tensor) -> np.ndarray:
        found = grad.reshape(grad.shape[0], -1).double().numpy()
        return found if found.shape[0] <= found.shape[1] else found.T

    grads = [[matrix(gradient(rank, step, dims)) for rank in range(world_size)] for step in range(8)]
    start = PowerSGD(2).start(Context("w", step=1, world_size=world_size), grads[0][0].shape[1])
    for mean, update in zip(by_rank[0], published(start.T, grads), strict=True):
        assert np.abs(matrix(mean) - update).max() < 2e-4 * np.abs(update).max()


@pytest.mark.parametrize("shape", SHAPES.values())
def test_a_matrix_of_that_rank_is_recovered(shape: tuple[int, ...]) -> None:
    rows, columns = shape[0], int(np.prod(shape[1:]))
    exact = (normal(3 * rows).reshape(rows, 3) @ normal(3 * columns, seed=1).reshape(3, columns)).reshape(shape)
    off = np.abs(sent(gw.make("powersgd", rank=3), exact) - exact.numpy()).max()
    assert off < 2e-5 * float(exact.abs().max())
    assert np.abs(sent(gw.make("powersgd", rank=2), exact) - exact.numpy()).max() > 0.01


def test_both_factors_travel_and_no_more() -> None:
    """Two ranks: 4 r n bytes in the preliminary round, 4 r m of payload, two headers, two lengths."""
    with ranks(2, Plan({"w": gw.make("powersgd", rank=2)}, strategy="allgather")) as group:
        group.each(lambda one: train(one, range(1), (24, 50)))
        assert [sum(each.sent_bytes) for each in group.network.transports] == [4 * 2 * (24 + 50) + 2 * (72 + 4)] * 2


def test_what_is_no_larger_than_its_factors_travels_whole_and_exact() -> None:
    codec = gw.make("powersgd", rank=4)
    for grad in (normal(500), normal(35).reshape(5, 7), normal(8 * 8).reshape(8, 8), torch.tensor(2.0)):
        assert codec.stats_spec(TensorSpec.of(grad)) == [(0, "sum")]
        assert codec.encode(grad, context(grad)).body.nbytes == 4 * grad.numel()
        assert np.array_equal(sent(codec, grad), grad.numpy())


@pytest.mark.parametrize("strategy", NAMES)
def test_a_resumed_job_goes_on_bit_for_bit(strategy: str) -> None:
    plan = Plan({"w": gw.make("powersgd", rank=2)}, strategy=strategy)

    def resume(one: Synchronizer) -> list[torch.Tensor]:
        one.register({"w": TensorSpec((24, 50))})
        one.load_state_dict(states[one.rank])
        return train(one, range(4, 8), (24, 50))

    with ranks(3, plan) as group:
        group.each(lambda one: train(one, range(4), (24, 50)))
        states = group.each(lambda one: one.state_dict())
        expected = group.each(lambda one: train(one, range(4, 8), (24, 50)))
    assert any("states" in state["residuals"] for state in states)
    with ranks(3, plan) as group:
        found = group.each(resume)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))


def test_without_its_state_it_would_not() -> None:
    """The test above can fail: Q matters, even with residuals."""
    plan = Plan({"w": gw.make("powersgd", rank=2)})

    def resume(one: Synchronizer) -> list[torch.Tensor]:
        one.register({"w": TensorSpec((24, 50))})
        one.load_state_dict(states[one.rank])
        return train(one, range(4, 5), (24, 50))

    with ranks(2, plan) as group:
        group.each(lambda one: train(one, range(4), (24, 50)))
        states = group.each(lambda one: one.state_dict())
        expected = group.each(lambda one: train(one, range(4, 5), (24, 50)))
    for state in states:
        del state["residuals"]["states"]
    with ranks(2, plan) as group:
        assert not torch.equal(group.each(resume)[0][0], expected[0][0])


@pytest.mark.parametrize("strategy", NAMES)
def test_a_step_that_is_not_finite_leaves_no_trace(strategy: str) -> None:
    plan = Plan({"w": gw.make("powersgd", rank=2)}, strategy=strategy)
    with ranks(3, plan) as group:
        means = group.each(lambda one: train(one, range(7), (24, 50), spoilt=4))
    with ranks(3, plan) as group:
        expected = group.each(lambda one: [*train(one, range(4), (24, 50)), *train(one, range(5, 7), (24, 50))])
    for mine, theirs in zip(means, expected, strict=True):
        assert not mine[4].isfinite().all()
        assert all(torch.equal(one, two) for one, two in zip(mine[:4] + mine[5:], theirs, strict=True))


def test_residuals_do_not_drift_apart_where_ranks_see_different_data() -> None:
    """Constant gradients, for which residuals of torch's hook grow without bound."""

    def norm(one: Synchronizer, steps: int) -> float:
        for _ in range(steps):
            one.begin_step()
            one.submit([GradientSlice("w", gradient(one.rank, 0, (24, 50)))])
            one.commit()
        return float(np.linalg.norm(one.residuals.total()["w"]))

    with ranks(2, Plan({"w": gw.make("powersgd", rank=2)})) as group:
        early = max(group.each(lambda one: norm(one, 40)))
        late = max(group.each(lambda one: norm(one, 120)))
    assert late < 1.5 * early


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", NAMES)
def test_nothing_is_lost(strategy: str, dtype: torch.dtype) -> None:
    """Produced = applied + residuals, over 60 steps; every seventh is skipped and every ninth not finite."""

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        produced, applied = torch.zeros(60, 17, dtype=torch.float64), torch.zeros(60, 17, dtype=torch.float64)
        for step in range(60):
            one.begin_step()
            grad = gradient(one.rank, step, (60, 17)).to(dtype)
            kept = grad.double() / 3
            if step % 9 == 8 and one.rank == step % 3:
                grad[5, 5] = torch.inf
            one.submit([GradientSlice("w", grad)])
            one.wait()
            if step % 7 == 6:
                one.rollback()
                continue
            one.commit()
            if step % 9 != 8:
                produced += kept
                applied += grad.double()
        held = torch.zeros(60 * 17, dtype=torch.float64)
        for values in one.residuals.total().values():
            held += torch.from_numpy(values)
        return produced, applied, held.view(60, 17)

    with ranks(3, Plan({"w": gw.make("powersgd", rank=2)}, strategy=strategy)) as group:
        found = group.each(run)
    produced, held = sum(each[0] for each in found), sum(each[2] for each in found)
    assert held.norm() > 0.1 * produced.norm() / 60
    # A mean is written in the gradient's own element type, 8 bits of it for bfloat16, and that is not fed back.
    slack = 1e-4 if dtype == torch.float32 else 2**-8 * 8
    assert (found[0][1] + held - produced).abs().max() < slack * produced.abs().max()


def test_a_first_step_draws_factors_that_are_the_same_on_all_ranks() -> None:
    codec, grad = PowerSGD(2), gradient(0, 0, (24, 50))
    body = codec.encode(grad, context(grad)).body.tobytes()
    for other in ({"rank": 1}, {"stage": 1}):
        assert codec.encode(grad, context(grad, **other)).body.tobytes() == body
    for other in ({"seed": 8}, {"step": 4}, {"name": "fc.bias"}):
        assert codec.encode(grad, context(grad, **other)).body.tobytes() != body


def test_zeros_do_not_stop_the_iteration() -> None:
    def run(one: Synchronizer) -> torch.Tensor:
        for values in (torch.zeros(24, 50), torch.ones(24, 50)):
            one.begin_step()
            one.submit([GradientSlice("w", values)])
            one.commit()
        return values

    with ranks(2, Plan({"w": "powersgd"})) as group:
        for mean in group.each(run):
            assert torch.allclose(mean, torch.ones(24, 50), atol=1e-5)


def test_a_rank_whose_backward_left_the_parameter_out_takes_the_mean_of_the_others() -> None:
    def run(one: Synchronizer) -> torch.Tensor:
        one.begin_step()
        values = torch.full((24, 50), 3.0 * (one.rank != 1))
        one.submit([GradientSlice("w", values, used=one.rank != 1)])
        one.commit()
        assert one.residuals.states.get("w", ElementRange(0, 1200), one.step + 1) is not None
        return values

    with ranks(3, Plan({"w": "powersgd"})) as group:
        means = group.each(run)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert torch.allclose(means[0], torch.full((24, 50), 2.0), atol=1e-5)


def test_another_rank_goes_on_from_the_columns_that_are_there() -> None:
    rows = torch.arange(1.0, 101.0)  # two rows of Q of 50
    ctx = Context("w", state=rows.numpy())
    unit = (rows.view(2, 50) / rows.view(2, 50).norm(dim=1, keepdim=True)).numpy()
    assert np.allclose(PowerSGD(1).start(ctx, 50), unit[:1])
    longer = PowerSGD(3).start(ctx, 50)
    assert np.allclose(longer[:2], unit) and np.allclose(np.linalg.norm(longer, axis=1), 1)
    assert np.array_equal(PowerSGD(3).start(ctx, 49), PowerSGD(3).start(Context("w"), 49))


def test_a_basis_is_orthonormal_and_dependent_rows_are_dropped() -> None:
    rows = heavy_tailed(5 * 300).reshape(5, 300).numpy()
    basis = orthonormal(rows)
    assert np.allclose(basis @ basis.T, np.eye(5), atol=1e-6)
    assert np.allclose(rows @ basis.T @ basis, rows, atol=1e-4)
    rows[3] = 2 * rows[0] - rows[1]
    rows[4] = 0
    assert np.flatnonzero(orthonormal(rows).any(1)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("largest", [3e38, 1e-38, 1e-44])
def test_the_largest_and_smallest_floats_do_no_harm(largest: float) -> None:
    grad = torch.full((30, 40), largest) * torch.where(torch.arange(40) % 2 == 0, 1, -1)
    codec, residual = gw.make("powersgd", rank=2), np.empty(1200, np.float32)
    payload = codec.encode(grad, context(grad), residual_out=residual)
    assert not payload.nonfinite and np.isfinite(residual).all()
    found = codec.decode(payload, context(grad))
    assert np.allclose(found.numpy() + residual.reshape(30, 40), grad.numpy(), rtol=1e-6, atol=1e-44)
    if 1e-40 < largest < 1e38:  # beyond, Q is cut to what is finite and the residual has the rest
        assert np.allclose(found.numpy(), grad.numpy(), rtol=1e-4)


def test_a_residual_beyond_float32_is_refused_as_a_gradient_that_is_not_finite_is() -> None:
    """One element has the other sign: what a low rank sends of it is nearly as far beyond zero."""
    grad = torch.full((12, 40), 3.3e38)
    grad[0, 0] *= -1
    codec, residual = gw.make("powersgd", rank=1), np.empty(grad.numel(), np.float32)
    assert codec.encode(grad, context(grad), residual_out=residual).nonfinite
    assert not codec.encode(grad / 4, context(grad), residual_out=residual).nonfinite
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("shape", [(24, 50), (5, 7)])
def test_a_sum_that_overflows_is_cut_to_finite_values(shape: tuple[int, int]) -> None:
    codec, grad = gw.make("powersgd", rank=2), torch.full(shape, 1e38)
    stats, out = reduced(codec, [grad]), torch.empty(shape)
    accumulator = np.full(codec.accumulator_size(TensorSpec(shape)), np.inf, np.float32)
    codec.finalize(accumulator, 4, context(grad), codec.finish_stats(stats, TensorSpec(shape)), out)
    assert codec.has_finite_sums and out.isfinite().all() and out.max() > 1e37


@pytest.mark.parametrize("shared", [False, True])
def test_damaged_factors_are_refused_or_decode_to_finite_values(shared: bool) -> None:
    codec, grad = gw.make("powersgd", rank=2), heavy_tailed(24 * 50).reshape(24, 50)
    stats = reduced(codec, [grad]) if shared else []
    payload = codec.encode(grad, context(grad), stats)
    rng, body = np.random.default_rng(0), bytes(payload.body)
    assert len(body) == 4 * 2 * (50 if shared else 74)
    refused = 0
    for _ in range(200):
        other = bytearray(body)
        for at in rng.integers(len(body), size=4):
            other[at] = rng.choice([0x7F, 0xFF, 0x80, int(rng.integers(256))])
        try:
            found = codec.decode(with_body(payload, bytes(other)), context(grad), stats=stats)
        except PayloadError:
            refused += 1
        else:
            assert found.isfinite().all()
    assert 0 < refused < 200
    for wrong in (body[:-4], body + bytes(4)):
        with pytest.raises(PayloadError, match=f"Expected {len(body)} bytes"):
            codec.decode(with_body(payload, wrong), context(grad), stats=stats)


def test_stats_of_another_tensor_are_refused() -> None:
    codec, grad = gw.make("powersgd", rank=2), normal(24 * 50).reshape(24, 50)
    payload = codec.encode(grad, context(grad), reduced(codec, [grad]))
    with pytest.raises(ValueError, match="Pass the result of `stats`, reduced over ranks"):
        codec.decode(payload, context(grad), stats=[np.ones(3, np.float32)])


def test_a_range_of_a_tensor_is_refused_with_advice() -> None:
    def run(one: Synchronizer) -> Any:
        one.register({"w": TensorSpec((24, 50))})
        one.submit([GradientSlice("w", torch.ones(600), offset=600)])

    with ranks(2, Plan({"w": "powersgd"})) as group:
        for outcome in group.outcomes(run):
            assert isinstance(outcome, OptionError)
            assert "Submit full tensors, or choose another compressor" in str(outcome)


@pytest.mark.parametrize("shape", [(400, 300), (20, 3000), (3000, 20), (64, 3, 7, 7), (6, 6), (500,)])
@pytest.mark.parametrize("strategy", ["scatter_reduce", "ring", "allgather"])
def test_planner_and_simulator_know_the_bytes_of_every_shape(shape: tuple[int, ...], strategy: str) -> None:
    """They are measured with squares."""
    plan, world_size = Plan({"w": "powersgd"}, strategy=strategy), 3
    spec, count = TensorSpec(shape), math.prod(shape)
    measured = {
        name: measure_codec(gw.make(name), (1 << 12, 1 << 16), 0.02, world_size=3) for name in ("powersgd", "none")
    }

    def run(one: Synchronizer) -> int:
        one.register({"w": spec})
        before = sum(one._engine.transport.sent_bytes)
        one.submit([GradientSlice("w", torch.randn(shape))]).wait()
        return sum(one._engine.transport.sent_bytes) - before

    with ranks(world_size, plan) as group:
        sent = sum(group.each(run))
    link = LinkCosts(0.0, 1.0)  # a second per byte
    known = Costs(world_size, (link,), measured)
    codec = codec_for(PlannedTensor("w", shape), "powersgd", known)
    planned = route("powersgd", strategy, 1, count, known, codec=codec)
    simulated = simulated_step(
        SimulatedModel([SimulatedGradient("w", shape)]),
        plan,
        Cluster(world_size, SimulatedLink(1e9, header_bytes=0)),
        known,
    )
    assert simulated.sent_bytes * world_size == pytest.approx(sent)
    if strategy != "ring":  # whose hops are counted as if each rank began with a range of its own
        lengths = 4 * simulated.num_messages  # which the planner leaves out
        assert planned.wire * world_size == pytest.approx(sent, rel=0.02, abs=lengths)


def test_the_rank_is_checked() -> None:
    with pytest.raises(OptionError, match="rank must be from 1 to 1024"):
        compressors.make("powersgd", rank=0)
