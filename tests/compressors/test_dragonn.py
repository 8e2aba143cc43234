"""DRAGONN: elements lost to collisions, which differ in each step, and their cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.compressors.base import StatefulCompressor
from gradwire.compressors.dragonn import corrected
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange
from gradwire.kernels.reference.hashing import hash_numbers, hash_slots
from gradwire.lang import interpret
from gradwire.lang.errors import TraceError
from gradwire.lang.operators.arithmetic import evaluate_static
from gradwire.residuals import EncodeInput, ResidualKey, Residuals, get
from gradwire.sync.resize import resize_state
from gradwire.wire.payload import Payload
from tests.compressors.harness import body, list_bytes, sent, traced
from tests.contracts.compressor_cases import context, heavy_tailed, normal


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("size", "ratio"), [(50_000, 0.02), (400_000, 0.01)])
def test_the_top_k_is_covered_as_balls_fill_bins(size: int, ratio: float, load: float) -> None:
    """With k = load · slots: a fraction of (1 - exp(-load)) / load, whatever the sample was."""
    slots = round(size * ratio)
    top = round(load * slots)
    codec, covered = traced("dragonn", ratio=ratio, load=load), []
    for step in range(20):
        grad = heavy_tailed(size, seed=step) if step % 2 else normal(size, seed=step)
        found = sent(codec, grad, step=step)
        kept = np.flatnonzero(found)
        assert np.array_equal(found[kept], grad.numpy()[kept])
        assert kept.size <= np.ceil(-np.expm1(-load) * slots)
        largest = np.argsort(-np.abs(grad.numpy()), kind="stable")[:top]
        covered.append(np.count_nonzero(found[largest]) / top)
    assert abs(np.mean(covered) + np.expm1(-load) / load) < 0.03


@pytest.mark.parametrize("carry", [False, True])
def test_the_smallest_magnitude_sent_is_within_a_tenth_of_the_threshold(carry: bool) -> None:
    """Measured as the number of elements above it: 1,000, with a standard deviation below 10 %."""
    codec, residuals, errors = traced("dragonn", ratio=0.01, carry=carry), Residuals(), []
    for step in range(40):
        grad = heavy_tailed(SIZE, seed=step) if step % 2 and not carry else normal(SIZE, seed=step)
        state = residuals.states.get("w", KEY.range, step)
        ctx = replace(context(grad, step=step), state=state)
        payload = codec.encode(grad, ctx)
        if carry:
            residuals.states.stage("w", KEY.range, codec.next_state(payload, ctx), step)
            residuals.commit()
        found = np.abs(codec.decode(payload, ctx).numpy())
        errors.append(np.count_nonzero(np.abs(grad.numpy()) >= found[found > 0].min()) / 1000 - 1)
    assert abs(np.mean(errors)) < 0.05
    assert np.std(errors) < 0.1


def test_no_position_is_preferred() -> None:
    """Survival of the largest by decile of position: χ² over 200 steps, with an error rate of 0.1 %."""
    codec, survived, large = traced("dragonn", ratio=0.01), np.zeros(10), np.zeros(10)
    for step in range(200):
        grad = normal(20_000, seed=step)
        top = np.argsort(-np.abs(grad.numpy()), kind="stable")[:200]
        found = sent(codec, grad, step=step)
        large += np.bincount(top // 2000, minlength=10)
        survived += np.bincount(top[found[top] != 0] // 2000, minlength=10)
    share = survived.sum() / large.sum()
    chi_squared = np.sum((survived - share * large) ** 2 / (large * share * (1 - share)))
    assert chi_squared < 27.88  # of 9 degrees of freedom
    assert 0.60 < share < 0.66


@pytest.mark.parametrize("plateau", [1.0, 1e-6])
def test_a_plateau_of_equal_values_does_not_drown_large_elements(plateau: float) -> None:
    grad, codec = torch.full((512_000,), plateau), traced("dragonn", ratio=0.001)
    places = np.random.default_rng(0).choice(grad.numel(), 512, replace=False)
    grad[torch.from_numpy(places)] = 100 * plateau
    kept = [np.count_nonzero(np.abs(sent(codec, grad, step=step)) > 2 * plateau) for step in range(20)]
    assert min(kept) >= 0.55 * 512
    assert np.mean(kept) >= 0.6 * 512


def test_element_0_is_sent() -> None:
    for size in (1, 7, 1000, 70_000):
        found = sent(
            traced("dragonn"),
            torch.eye(size)[0] if size < 5000 else torch.zeros(size).index_fill(0, torch.tensor([0]), 2.0),
        )
        assert np.flatnonzero(found).tolist() == [0]
    grad = normal(3000).index_fill(0, torch.tensor([0]), 100.0)
    times = sum(sent(traced("dragonn", ratio=0.05), grad, step=step)[0] == 100 for step in range(60))
    assert times == 60  # the largest of all always stays


def test_each_step_rank_seed_and_tensor_loses_others_and_none_for_ever() -> None:
    """64 elements of equal magnitude in 64 slots."""
    grad, codec = torch.zeros(6400), traced("dragonn", ratio=0.01)
    grad[::100] = 1.0
    steps = [np.flatnonzero(sent(codec, grad, step=step)) for step in range(80)]
    assert len({tuple(each) for each in steps}) == 80
    assert np.unique(np.concatenate(steps)).size == 64
    first = steps[3].tolist()
    for other in ({"rank": 1}, {"seed": 8}, {"name": "fc.bias"}, {"stage": 1}):
        assert np.flatnonzero(sent(codec, grad, step=3, **other)).tolist() != first
    assert np.flatnonzero(sent(codec, grad, step=3)).tolist() == first


def test_zeros_are_not_sent() -> None:
    """The sampled threshold is zero, so all elements reach it."""
    grad = torch.zeros(10_000).index_fill(0, torch.tensor([17, 9000]), 3.0)
    assert set(np.flatnonzero(sent(traced("dragonn", ratio=0.01), grad)).tolist()) <= {17, 9000}
    assert body(traced("dragonn"), torch.zeros(500)).nbytes == 4


def test_a_constant_gradient_fills_the_slots_and_the_rest_waits() -> None:
    grad, codec, residuals = torch.ones(2000), traced("dragonn", ratio=0.05), Residuals()
    applied, key = np.zeros(2000), ResidualKey("w", ElementRange(0, 2000))
    for step in range(200):
        payload = get("error").encode(EncodeInput(codec, grad, context(grad, step=step), residuals, key))
        assert payload.body.nbytes <= list_bytes(2000, 100)
        applied += codec.decode(payload, context(grad, step=step)).numpy()
        residuals.commit()
    kept = residuals.total()["w"]
    np.testing.assert_array_equal(applied + kept, 200.0)  # integers: not a bit is lost
    assert applied.min() > 0
    assert kept.mean() < 40


@settings(max_examples=40)
@given(
    d=st.integers(2, 300),
    share=st.floats(0.01, 1),
    load=st.floats(0.3, 5),
    seed=st.integers(0, 2**31),
    heavy=st.booleans(),
)
def test_it_contracts_as_lemma_a8_says(d: int, share: float, load: float, seed: int, heavy: bool) -> None:
    """The mean error over 200 draws of the hash, with six standard errors."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(d) * (np.exp(rng.standard_normal(d)) if heavy else 1) + 1e-3
    n = max(1, int(share * d))
    m = max(1, round(n / load))
    index = np.sort(np.argsort(-np.abs(theta), kind="stable")[:n])
    energy, top = theta**2, np.abs(theta[index])
    errors = []
    for draw in range(200):
        table = np.zeros(m)
        np.maximum.at(table, hash_slots(index, *hash_numbers(seed + 1000 * draw + 1), m), energy[index])
        errors.append(energy.sum() - table.sum())
    tau = top.max() / top.min()
    bound = (1 - m * (1 - ((m - 1) / m) ** n) / (d * tau**2)) * energy.sum()
    assert np.mean(errors) <= bound + 6 * np.std(errors) / np.sqrt(200) + 1e-9 * energy.sum()


def test_the_codec_contracts_as_lemma_a8_says() -> None:
    grad, codec = normal(400), traced("dragonn", ratio=0.1)
    x = grad.numpy().astype(np.float64)
    errors = [np.square(x - sent(codec, grad, step=step)).sum() for step in range(300)]
    top = np.sort(np.abs(x))[-40:]
    epsilon = 40 * (1 - (39 / 40) ** 40) / (400 * (top.max() / top.min()) ** 2)
    assert np.mean(errors) <= (1 - epsilon) * np.square(x).sum()
    # Better than a random 63 % of the largest, because larger ones win.
    assert np.mean(errors) < np.square(x).sum() - 0.64 * np.square(top).sum()


@pytest.mark.parametrize(
    ("size", "ratio", "load", "expected"),
    [
        (10_000, 0.01, 1.0, 400), (10_000, 0.01, 2.0, 200), (10**6, 0.01, 1.0, 977), (10**7, 0.001, 1.0, 8192),
        (10**8, 0.001, 1.0, 24_415), (10**8, 0.00001, 1.0, 400_000),
    ],
)  # fmt: skip
def test_a_sample_has_4_above_the_threshold_or_a_part_of_the_gradient(
    size: int, ratio: float, load: float, expected: int
) -> None:
    (sampled,) = [
        node for node in traced("dragonn", ratio=ratio, load=load).program.encode_nodes() if node.op == "sample"
    ]
    assert evaluate_static(sampled.inputs[1], size) == expected


@pytest.mark.parametrize("load", [0.0, -1.0, 17.0])
def test_loads_without_meaning_are_refused(load: float) -> None:
    with pytest.raises(OptionError, match="load must be in the range 0 < load <= 16"):
        gw.make("dragonn", load=load)


def test_the_kept_fraction_warms_up() -> None:
    grad, codec = normal(8000), traced("dragonn", ratio=0.01, warmup=40)
    kept = [np.count_nonzero(sent(codec, grad, step=step)) for step in (1, 11, 21, 41)]
    for found, ratio in zip(kept, (0.25, 0.0625, 0.015625, 0.01)):
        assert 0.25 * ratio * 8000 <= found <= ratio * 8000


# -- thresholds that are carried over ------------------------------------------------------------------------------

SIZE, KEY = 100_000, ResidualKey("w", ElementRange(0, 100_000))


def trained(steps: int, residuals: Residuals, first: int = 0, scale_of=lambda step: 1.0, heavy: bool = False):
    """Payloads of steps with carried thresholds, and the number of filled slots of a thousand."""
    codec, bodies = traced("dragonn", ratio=0.01, carry=True), []
    for step in range(first, first + steps):
        grad = (heavy_tailed if heavy else normal)(SIZE, seed=step) * scale_of(step)
        bodies.append(encoded(codec, grad, step, residuals).body)
        residuals.commit()
    return bodies


def encoded(codec: StatefulCompressor, grad: torch.Tensor, step: int, residuals: Residuals) -> Payload:
    """Encode with residual and state, and stage the next ones, as a synchronizer does."""
    ctx = replace(context(grad, step=step), state=residuals.states.get("w", KEY.range, step))
    payload = get("error").encode(EncodeInput(codec, grad, ctx, residuals, KEY))
    residuals.states.stage("w", KEY.range, codec.next_state(payload, ctx), step)
    return payload


def filled(body: np.ndarray) -> float:
    return int(body[:4].view(np.uint32)[0]) / 1000


def threshold(residuals: Residuals) -> float:
    return float(residuals.state_dict()["states"]["w"][f"0:{SIZE}"][0])


@pytest.mark.parametrize("heavy", [False, True])
def test_carried_thresholds_fill_slots_like_sampled_ones(heavy: bool) -> None:
    residuals = Residuals()
    shares = [filled(body) for body in trained(60, residuals, heavy=heavy)]
    assert threshold(residuals) > 0
    assert max(shares) == 0.633
    assert np.mean(shares[10:]) > 0.62


def test_a_bound_that_is_far_too_high_is_sampled_anew_and_one_that_is_too_low_does_no_harm() -> None:
    residuals = Residuals()
    trained(5, residuals)
    before = threshold(residuals)
    (body,) = trained(1, residuals, first=5, scale_of=lambda step: 1000.0)
    assert filled(body) == 0.633
    assert threshold(residuals) > 100 * before
    residuals.states.stage("w", KEY.range, np.float32([1e9]), 5)
    residuals.commit()
    (body,) = trained(1, residuals, first=6)
    assert filled(body) == 0
    assert threshold(residuals) == 0
    (body,) = trained(1, residuals, first=7)
    assert filled(body) == 0.633


def test_a_carried_threshold_needs_no_sample_and_is_the_threshold() -> None:
    codec, grad = traced("dragonn", ratio=0.01, carry=True), normal(SIZE)
    (sampled,) = [node for node in codec.program.encode_nodes() if node.op == "sample"]
    assert evaluate_static(sampled.inputs[1], SIZE, 0, 0.5) == 1
    assert evaluate_static(sampled.inputs[1], SIZE) == 400
    ctx = context(grad, step=3)
    given = Context(ctx.name, ctx.step, ctx.rank, ctx.world_size, ctx.seed, spec=ctx.spec,
                    state=np.float32([3.0]))  # fmt: skip
    found = codec.decode(codec.encode(grad, given), ctx).numpy()
    assert np.abs(found[found != 0]).min() >= 3.0
    many = np.flatnonzero(np.abs(grad.numpy()) >= 3.0)
    assert set(np.flatnonzero(found)) <= set(many.tolist())
    assert np.count_nonzero(found) > 0.8 * many.size  # 270 elements for 1,000 slots
    env = interpret.Environment(SIZE, ctx.shared_key, ctx.private_key, 0, 3, previous_state=3.0)
    oracle = interpret.encode(codec.program, grad.numpy(), env)
    assert oracle is not None
    assert oracle[0].tobytes() == codec.encode(grad, given).body.tobytes()


def test_without_a_state_the_threshold_is_sampled() -> None:
    grad = normal(SIZE)
    bodies = [body(traced("dragonn", ratio=0.01, carry=carry), grad).tobytes() for carry in (False, True)]
    assert bodies[0] == bodies[1]


def test_few_slots_and_payloads_without_numbers_leave_nothing() -> None:
    codec, grad = traced("dragonn", ratio=0.01, carry=True), normal(5000)
    assert codec.next_state(codec.encode(grad, context(grad)), context(grad)) == 0
    bad = grad.index_fill(0, torch.tensor([3]), torch.nan)
    assert codec.next_state(codec.encode(bad, context(bad)), context(bad)) is None
    plain = traced("dragonn")
    assert plain.next_state(plain.encode(grad, context(grad)), context(grad)) is None


def test_the_count_moves_the_bound_the_right_way() -> None:
    def after(kept: int) -> float:
        payload = np.concatenate(
            [np.array([kept], np.uint32).view(np.uint8), np.full(kept, -2, np.float32).view(np.uint8)]
        )
        return float(corrected(payload, SIZE, 0, ratio=0.01, warmup=0, load=1.0)[0])

    assert 1.65 < after(320) < after(500) < after(632)
    assert after(632) == pytest.approx(0.95 * 2.0, rel=1e-3)
    assert after(633) == pytest.approx(0.95 * 2.0, rel=1e-3)
    assert after(310) == 0


def test_what_is_carried_is_rolled_back_and_resumed_bit_for_bit() -> None:
    one, other = Residuals(), Residuals()
    trained(4, one)
    codec, grad = traced("dragonn", ratio=0.01, carry=True), normal(SIZE, seed=99)
    encoded(codec, grad, 4, one)
    one.rollback()
    other.load_state_dict(one.state_dict(), {"w": context(torch.empty(SIZE)).spec})
    for mine, resumed in zip(trained(3, one, first=4), trained(3, other, first=4)):
        assert mine.tobytes() == resumed.tobytes()


def test_a_job_of_another_size_samples_its_thresholds() -> None:
    states = []
    for rank in range(2):
        residuals = Residuals()
        residuals.states.stage("w", KEY.range, np.float32([1 + rank]), step=1)
        residuals.commit()
        common = {"rank": rank, "world_size": 2, "version": 2, "step": 2, "seed": 0}
        states.append({**common, "residuals": residuals.state_dict()})
    (resized,) = resize_state(states, 1)
    assert all("states" in state["residuals"] for state in states)
    assert "states" not in resized["residuals"], "ranks had different ones"


def test_decoders_have_no_state() -> None:
    from gradwire.lang import concat, previous_state

    @gw.compressor
    def forgetful(g):
        return concat(q=g)

    with pytest.raises(TraceError, match="previous_state"):
        forgetful.decode(lambda p: p.q * previous_state())
