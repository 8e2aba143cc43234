"""Momentum correction: it equals momentum SGD if everything is sent, loses nothing, and is saved with the residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals import EncodeInput, MomentumCorrection, ResidualKey, Residuals, get
from tests.contracts.compressor_cases import context, normal

SIZE = 200
KEY = ResidualKey("fc.weight", ElementRange(0, SIZE))
VELOCITY = ResidualKey("fc.weight", ElementRange(0, SIZE), "velocity")
SPARSIFIERS = [
    compressors.make(name, **options)
    for name, options in {
        "topk": {"ratio": 0.1}, "dgc": {"ratio": 0.1}, "mstopk": {"ratio": 0.1}, "graddrop": {"ratio": 0.1},
        "dragonn": {"ratio": 0.1}, "threshold": {}, "adacomp": {"block": 32},
    }.items()
]  # fmt: skip
each_sparsifier = pytest.mark.parametrize("codec", SPARSIFIERS, ids=repr)


def step(policy, codec, grad, residuals, at=0, scale=1.0, world_size=1) -> np.ndarray:
    """Take a step on one rank, and return the decoded payload."""
    ctx = context(grad, step=at, world_size=world_size)
    own = policy.contribution(EncodeInput(codec, grad, ctx, residuals, KEY, scale))
    return codec.decode(policy.encode(own), ctx).numpy()


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_momentum_sgd_if_everything_is_sent(nesterov: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(SIZE))
    sgd = torch.optim.SGD([weight], 1.0, momentum=0.8, nesterov=nesterov)
    policy, residuals, total = MomentumCorrection(0.8, nesterov=nesterov), Residuals(), np.zeros(SIZE)
    for at in range(6):
        weight.grad = normal(SIZE, seed=at)
        sgd.step()
        total -= step(policy, compressors.make("none"), normal(SIZE, seed=at), residuals)
        residuals.commit()
    np.testing.assert_allclose(total, weight.detach().numpy(), atol=1e-5)
    assert residuals.total() == {}  # exact compressors keep nothing back


@each_sparsifier
@pytest.mark.parametrize("masking", [True, False])
def test_velocities_are_sent_or_in_the_residual(codec, masking: bool) -> None:
    """30 steps, of which a fifth is rolled back: the sum of velocities is what was sent plus the residual."""
    policy, residuals = MomentumCorrection(0.9, masking=masking), Residuals()
    velocity, produced, applied = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for at in range(30):
        grad = normal(SIZE, seed=at)
        now = 0.9 * velocity + 0.5 * grad.numpy()
        before = residuals.total().get("fc.weight", 0.0)
        sent = step(policy, codec, grad, residuals, at, scale=0.5)
        if at % 5 == 4:
            residuals.rollback()
            continue
        residuals.commit()
        stopped = sent != 0
        if codec.loses_selected:
            stopped |= np.abs(before + now) > np.abs(sent[stopped]).min()
        velocity = np.where(stopped, 0, now) if masking and codec.sparse else now
        produced, applied = produced + now, applied + sent
        np.testing.assert_allclose(residuals.source(VELOCITY), velocity, atol=1e-4)
    np.testing.assert_allclose(applied + residuals.total()["fc.weight"], produced, atol=1e-3)
    assert np.count_nonzero(applied) > 0


def test_compressors_that_send_all_elements_keep_their_velocities() -> None:
    residuals, grad = Residuals(), normal(SIZE)
    sent = step(MomentumCorrection(0.9), compressors.make("onebit"), grad, residuals)
    residuals.commit()
    assert sent.all()
    np.testing.assert_array_equal(residuals.source(VELOCITY), grad.numpy())


def test_elements_that_lose_a_collision_lose_their_velocity() -> None:
    """40 large elements for 40 slots: those that stay behind are stopped like those sent, and no others."""
    codec, residuals = compressors.make("dragonn", ratio=0.2), Residuals()
    grad = 0.01 * normal(SIZE)
    grad[::5] = 100 + torch.arange(40.0)
    sent = step(MomentumCorrection(0.9), codec, grad, residuals)
    residuals.commit()
    velocity, arrived = residuals.source(VELOCITY), sent != 0
    assert 20 <= arrived.sum() <= 26
    lost = (grad.numpy() > np.abs(sent[arrived]).min()) & ~arrived
    assert lost.sum() >= 3
    assert not velocity[arrived | lost].any()
    np.testing.assert_array_equal(velocity[~(arrived | lost)], grad.numpy()[~(arrived | lost)])
    assert not compressors.make("topk").loses_selected


def test_an_unbiased_sparsifier_sends_the_velocity_on_average_and_keeps_nothing() -> None:
    policy, codec, total = MomentumCorrection(0.9), compressors.make("randomk", ratio=0.25), np.zeros(SIZE)
    for seed in range(400):
        residuals = Residuals()
        for at in range(2):
            sent = step(policy, codec, normal(SIZE, seed=at), residuals, 2 * seed + at)
            residuals.commit()
        total += sent
        assert residuals.total() == {}
    velocity = 0.9 * normal(SIZE).numpy() + normal(SIZE, seed=1).numpy()
    assert np.abs(total / 400 - velocity).max() < 6 * np.sqrt(3 / 400) * np.abs(velocity).max()
    np.testing.assert_allclose(residuals.source(VELOCITY), velocity, rtol=1e-5)


def test_aggregates_have_no_velocity() -> None:
    policy, residuals, grad = MomentumCorrection(), Residuals(), normal(SIZE)
    key = ResidualKey("w", ElementRange(0, SIZE), "aggregate")
    policy.encode(EncodeInput(SPARSIFIERS[0], grad, context(grad), residuals, key))
    residuals.commit()
    assert "velocity" not in residuals.state_dict()


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize(("clip", "is_clipped"), [(0.0, False), (1000.0, False), (4.0, True)])
def test_gradients_are_clipped_by_their_share_of_the_norm(clip: float, is_clipped: bool, loss_scale: float) -> None:
    """Of 4 ranks, each contributes a quarter of its gradient, which may have half the norm: the gradient has twice."""
    grad = normal(SIZE)
    found = MomentumCorrection(0.0, clip=clip).factor(loss_scale * grad, 4, loss_scale)
    assert found == pytest.approx(clip * 2 / float(grad.double().norm()) if is_clipped else 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_gradients_are_marked_and_leave_no_trace(bad: float) -> None:
    assert MomentumCorrection(clip=1.0).factor(torch.tensor([3.0, bad]), 1, 1.0) == 1.0, "not 0, which would hide them"
    policy, residuals, codec = MomentumCorrection(), Residuals(), SPARSIFIERS[0]
    step(policy, codec, normal(SIZE), residuals)
    residuals.commit()
    before = residuals.source(VELOCITY).copy()
    assert np.isnan(step(policy, codec, normal(SIZE).index_fill(0, torch.tensor([3]), bad), residuals)).all()
    residuals.rollback()
    np.testing.assert_array_equal(residuals.source(VELOCITY), before)


# -- state ---------------------------------------------------------------------------------------------------------


def test_velocities_are_saved_restored_recut_and_scaled_with_residuals() -> None:
    policy, residuals, codec = MomentumCorrection(), Residuals(), SPARSIFIERS[0]
    step(policy, codec, normal(SIZE), residuals)
    residuals.commit()
    velocity = residuals.source(VELOCITY).copy()
    state = residuals.state_dict()
    assert set(state) == {"version", "local", "aggregate", "velocity"}
    resumed = Residuals()
    resumed.load_state_dict(state, {"fc.weight": TensorSpec((SIZE,))})
    for at in range(1, 4):
        found = [step(policy, codec, normal(SIZE, seed=at), each, at) for each in (residuals, resumed)]
        np.testing.assert_array_equal(*found)
        residuals.commit(), resumed.commit()
    resumed.load_state_dict(state, {"fc.weight": TensorSpec((SIZE,))})
    resumed.scale(0.5)
    parts = [resumed.source(ResidualKey("fc.weight", ElementRange(at, 50), "velocity")) for at in range(0, SIZE, 50)]
    np.testing.assert_array_equal(np.concatenate(parts), velocity / 2)
    assert resumed.nbytes >= 8 * SIZE
    resumed.drop_velocity("fc.weight")
    assert "velocity" not in resumed.state_dict()
    assert resumed.total()["fc.weight"].size == SIZE


def test_velocities_are_not_part_of_what_must_still_be_applied() -> None:
    residuals = Residuals()
    residuals.add(VELOCITY, np.ones(SIZE, np.float32))
    assert residuals.total() == {}
    assert residuals.norms() == {}
    assert not residuals.holds_after_pruning("fc.weight")


# -- text and optimizers -------------------------------------------------------------------------------------------


def test_a_policy_is_a_text_with_options() -> None:
    assert str(get("momentum")) == "momentum"
    policy = MomentumCorrection(0.95, nesterov=True, clip=2.0)
    assert str(policy) == "momentum:clip=2.0:momentum=0.95:nesterov=True"
    assert get(str(policy)).options == policy.options
    assert str(get("error")) == "error"
    with pytest.raises(UnknownNameError, match=r"option of momentum 'decay'.*clip, masking, momentum, nesterov"):
        get("momentum:decay=0.1")
    with pytest.raises(OptionError, match=r"0 <= momentum < 1, but is 1\.5"):
        get("momentum:momentum=1.5")
    with pytest.raises(TypeError, match="masking must be True or False"):
        get("momentum:masking=1")


def sgd(**options) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1, **options)


def test_momentum_is_taken_out_of_an_optimizer() -> None:
    optimizer = sgd(momentum=0.85, nesterov=True)
    policy = MomentumCorrection.of(optimizer, clip=3.0)
    assert policy.options == {"momentum": 0.85, "nesterov": True, "masking": True, "clip": 3.0}
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(2))})
    assert [(group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [(0, False)] * 2


def test_an_optimizer_keeps_its_momentum_if_another_option_is_wrong() -> None:
    optimizer = sgd(momentum=0.85)
    with pytest.raises(OptionError):
        MomentumCorrection.of(optimizer, clip=-1.0)
    assert optimizer.param_groups[0]["momentum"] == 0.85


def test_an_optimizer_whose_momentum_cannot_be_taken_is_refused_with_advice() -> None:
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    several = sgd(momentum=0.9)
    several.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "momentum": 0.5})
    for optimizer in (adam, several, sgd(momentum=0.9, dampening=0.1)):
        with pytest.raises(OptionError, match=r"one momentum and no dampening.*an optimizer without momentum"):
            MomentumCorrection.of(optimizer)
    assert several.param_groups[0]["momentum"] == 0.9
    taken = sgd(momentum=0.9)
    MomentumCorrection.of(taken)
    with pytest.raises(OptionError, match=r"This optimizer has no momentum.*load its state after that"):
        MomentumCorrection.of(taken)
    used = sgd(momentum=0.9)
    used.param_groups[0]["params"][0].grad = torch.ones(3)
    used.step()
    with pytest.raises(OptionError, match=r"Call MomentumCorrection\.of\(\) on a new optimizer"):
        MomentumCorrection.of(used)
