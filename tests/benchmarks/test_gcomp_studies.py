"""The studies of GCOMP with a tiny model and data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.papers.gcomp import gradients as gcomp_gradients
from benchmarks.papers.gcomp import hops as gcomp_hops
from benchmarks.papers.gcomp import loss as gcomp_loss
from benchmarks.papers.gcomp import model_codes, orders, scaling, zeros, zipped
from benchmarks.papers.gcomp import moments as gcomp_moments
from benchmarks.papers.gcomp.decoding import decoding_rates
from benchmarks.papers.gcomp.gradients import Levels, mantissa_bytes, native_bits
from benchmarks.papers.gcomp.models import Training, transformer
from torch import nn

from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels.prefix_code import NUM_SYMBOLS


def made_up(name: str = "made up") -> Training:
    """Twenty numbers in, three classes out."""

    def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(10_000 * seed + 100 * step + rank))
        return inputs, inputs[:, :3].argmax(1)

    return Training(name, lambda: nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3)), batch)


def test_every_way_of_decoding_gives_the_symbols_and_takes_as_many_bits() -> None:
    grad = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).numpy()
    grad[::97] = 1e-30  # after an escape
    rows = list(decoding_rates(grad))  # which compares what they give
    assert [row["method"] for row in rows] == ["tree", "a lookup a symbol", "gradwire"]
    assert len({row["case"] for row in rows}) == 1
    assert 2.4 < float(rows[0]["case"].split()[0]) < 3.2


def test_huffmans_own_code_of_equal_counts_takes_eight_bits() -> None:
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    counts[:256] = 5
    assert native_bits(counts, counts) == 8 * counts.sum()
    counts[0] = 10**6
    assert native_bits(counts, counts) / counts.sum() == pytest.approx(1, abs=0.05)


def test_mantissas_by_levels() -> None:
    found = Levels(zeros=10, of=[1, 2, 3, 4])
    assert mantissa_bytes(found, several=True, pruned=True) == (26 + 2 * 20 + 3 * 14 + 4 * 8) / 8
    assert mantissa_bytes(found, several=True, pruned=False) == mantissa_bytes(found, True, True) + 10
    assert mantissa_bytes(found, several=False, pruned=True) == (6 * 25 + 4 * 7) / 8


def test_rates_of_a_training_and_their_plots(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gcomp_gradients, "LEAST_DECODED", 100)
    found = list(gcomp_gradients.figures_of(made_up(), 20))
    rates = [row["value"] for row in found if row["metric"] == "rate" and row["method"] == "gcomp"]
    assert len(rates) == 6  # of two optimizers at three steps
    assert all(0 < rate < 1 for rate in rates)
    assert "with escape" in gcomp_gradients.table(found)
    gcomp_gradients.plot(found, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"rates.png", "tables.png", "levels.png", "escape.png", "decoding.png"}


@pytest.mark.parametrize("method", gcomp_loss.METHODS)
def test_replicas_are_one_or_meet_at_every_eighth_step(method) -> None:
    job = gcomp_loss.Job(made_up(), "SGD", method, seed=1)
    job.step(0)
    apart = [torch.equal(job.models[0][0].weight, model[0].weight) for model in job.models[1:]]
    assert not any(apart)
    assert all(0 < job.step(number) < 2 for number in range(1, 8))
    assert all(torch.equal(job.models[0][0].weight, model[0].weight) for model in job.models[1:])


def test_deviations_are_from_the_exact_sums_of_the_same_seed(tmp_path) -> None:
    found = [row for seed in (0, 1) for row in gcomp_loss.part(made_up(), "SGD, momentum", seed, 10)]
    off = gcomp_loss.of_seeds(found, "mean deviation")
    assert {key[2] for key in off} == set(gcomp_loss.METHODS) - {"exact"}
    assert all(len(values) == 2 for values in off.values())
    worst = {method: max(values) for (_, _, method), values in off.items()}
    assert worst["gcomp"] < 1e-5 < worst["18 bits cut"] < worst["every 8 steps"]
    (ratios,) = gcomp_loss.of_seeds(found, "ratio").values()
    assert all(0.3 < ratio < 0.9 for ratio in ratios)
    assert "SGD, momentum" in gcomp_loss.table(found)
    gcomp_loss.plot(found, tmp_path)
    assert (tmp_path / "losses.png").stat().st_size > 1000


def test_recorded_seeds_are_not_trained_again(monkeypatch) -> None:
    monkeypatch.setattr(gcomp_loss, "trainings", lambda *_: [made_up()])
    done = {("made up", "SGD", "0"), ("made up", "SGD", "2")}
    (rows,) = gcomp_loss.run(Path("none"), Path("none"), steps=5, optimizers="SGD", done=done)
    assert {(row["optimizer"], row["seed"]) for row in rows} == {("SGD", 1)}


def test_cuts_of_all_hops_stay_below_the_last_bit_with_the_guard_alone(monkeypatch) -> None:
    monkeypatch.setattr(gcomp_hops, "resnet", lambda data, batch_size: made_up())
    monkeypatch.setattr(gcomp_hops, "RANKS", (16,))
    worst = {
        (row["optimizer"], row["strategy"], row["method"]): row["value"]
        for row in gcomp_hops.run(Path("none"))
        if row["metric"] == "off, cut alone, largest"
    }
    for optimizer in gcomp_hops.CHOSEN:
        for strategy in ("ring", "scatter_reduce"):
            assert worst[optimizer, strategy, "exact"] == 0
            assert 0 < worst[optimizer, strategy, "gcomp"] < 1 < worst[optimizer, strategy, "without the guard"]


def test_sentences_become_numbers_by_how_often_a_word_occurs(tmp_path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("a b a\t1\nc a\t0\n")
    training = transformer(tmp_path, 4)
    tokens, labels = training.batch(0, 0, 0)
    assert tokens.shape == (4, 32)
    assert {tuple(row[:3].tolist()) for row in tokens} <= {(2, 3, 2), (4, 2, 0)}
    assert set(labels.tolist()) <= {0, 1}
    assert training.model()(tokens).shape == (4, 2)


@pytest.mark.parametrize("optimizer", gcomp_moments.CHOSEN)
def test_a_metric_of_all_that_a_step_writes_cuts_least_and_leaves_moments_alone(optimizer) -> None:
    found = list(gcomp_moments.figures_of(made_up(), optimizer, 10))
    values = {(row["method"], row["metric"], row.get("step")): row["value"] for row in found}
    rate = {metric: values[metric, "rate", None] for metric in gcomp_moments.METRICS}
    assert rate["any"] <= rate["parameter"] < rate["all"]
    assert rate["momentum"] <= rate["all"] <= rate["nothing"] < 1
    last_bit = 2.0**-22
    for metric in gcomp_moments.METRICS:
        assert values[metric, "parameters, percentile 99", 2] <= last_bit
    assert values["all", "momentum, percentile 99", 2] <= last_bit < values["parameter", "momentum, percentile 99", 2]
    assert len(gcomp_moments.table(found).splitlines()) == 2 + len(gcomp_moments.METHODS)


def test_limits_of_moments_by_hand() -> None:
    group = {"betas": (0.9, 0.99)}
    aux = {
        "parameter": torch.tensor([1.0, 1.0]),
        "first": torch.tensor([0.5, -2.0]),
        "second": torch.tensor([4.0, 0.01]),
        "numbers": torch.tensor(gcomp_moments.Numbers(direct=1.0, spread=0.99)),
    }
    grad = np.array([0.1, 3.0], np.float32)
    momentum, squared = np.array([4.5, 18.0]), np.array([4.0 * 49.5 / 0.1, 0.01 * 49.5 / 3.0])
    theta = np.array([2.0, 0.1]) * np.sqrt(0.99)  # 1 / (1 / sqrt(0.99 v))
    expected = {
        "parameter": theta,
        "any": np.maximum(theta, momentum),
        "momentum": np.minimum(momentum, squared),
        "all": np.minimum(theta, np.minimum(momentum, squared)),
        "nothing": np.zeros(2),
    }
    for metric in gcomp_moments.METRICS:
        assert gcomp_moments.limits_of(metric, grad, aux, group) == pytest.approx(expected[metric], rel=1e-5)


def test_zeros_are_half_of_the_rate_of_random_numbers() -> None:
    values = {
        share: {row["method"]: row["value"] for row in zeros.figures(zeros.made_up(share))} for share in (0.0, 0.5)
    }
    for found in values.values():
        assert found["levels derived"] < found["levels sent"] < found["lossless"]
    assert values[0.5]["none"] == pytest.approx(0.5, abs=0.01)
    assert all(values[0.5][method] < 0.6 * values[0.0][method] for method in zeros.METHODS)


def test_a_network_without_normalization_has_units_that_are_off() -> None:
    def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        return inputs, torch.arange(4)

    (first, second) = zeros.recorded(Training("made up", zeros.vgg, batch), (1, 3))
    assert (first[0], second[0]) == (1, 3)
    shares = [row["value"] for row in zeros.figures(second[2]) if row["metric"] == "zeros"]
    assert shares[0] > 0.2


@pytest.mark.parametrize("shape", model_codes.SHAPES)
def test_the_code_of_a_model_fits_numbers_of_its_distribution_alone(shape) -> None:
    rng = np.random.default_rng(0)
    values = (rng.gamma(1 / shape, size=1 << 16) ** (1 / shape) * rng.choice([-1.0, 1.0], 1 << 16)).astype(np.float32)
    for scale in (1.0, 1.3, 1e-20):
        chunk = model_codes.Chunk(values * np.float32(scale))
        bits = {each: chunk.modelled_bits(each, False) / values.size for each in model_codes.SHAPES}
        entropy = chunk.entropy_bits() / values.size
        assert entropy <= bits[shape] < entropy + 0.2
        assert bits[shape] < min(bits.values()) + 0.01


def test_bits_of_codes_with_zeros_counted() -> None:
    grad = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    grad[torch.rand(40_000, generator=torch.Generator().manual_seed(1)) < 0.95] = 0
    found = model_codes.bits_of([grad], [grad])
    assert found["normal, zeros counted"] < 0.6 * found["normal"]
    assert found["entropy of chunks"] <= min(found.values())
    assert found["best shape"] <= found["normal"]


def test_zipped_bytes_come_back() -> None:
    codec = zipped.Zlib()
    for grad in (torch.randn(3000, generator=torch.Generator().manual_seed(0)), torch.zeros(3000)):
        ctx = Context("w", spec=TensorSpec.of(grad))
        payload = codec.encode(grad, ctx)
        assert payload.body.nbytes <= grad.nbytes + 8
        assert torch.equal(codec.decode(payload, ctx), grad)


def test_payloads_of_a_large_ring_are_longer_than_a_ranks_own() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(20_000, generator=generator))
    state = scaling.OptimizerState(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)])
    aux = state("w", scaling.ElementRange(0, 20_000))
    grads = [1e-3 * torch.randn(20_000, generator=generator) for _ in range(32)]
    small, large = (scaling.ratio_of("gcomp", "ring", ranks, grads, aux) for ranks in (4, 32))
    assert small < large < scaling.ratio_of("lossless", "ring", 32, grads, {})


def test_distances_are_from_all_orders_but_oneself(monkeypatch) -> None:
    assert len({frozenset(order[:2]) | {order[2:]} for order in orders.ORDERS.values()}) == len(orders.ORDERS) == 12
    monkeypatch.setattr(orders, "ORDERS", {"a": (), "b": (), "c": ()})
    losses = {"a": [0.0, 0.0], "b": [1.0, 3.0], "c": [0.0, 1.0], orders.GCOMP: [4.0, 4.0]}
    found = orders.mean_distances({name: np.array(curve) for name, curve in losses.items()})
    assert found == pytest.approx({"a": 1.25, "b": 1.75, "c": 1.0, orders.GCOMP: (4 + 2 + 3.5) / 3})


def test_gcomp_is_as_far_away_as_orders_are_where_training_amplifies_roundings() -> None:
    rows = list(orders.part(made_up(), "SGD", 0, 8))
    away = {row["method"]: row["value"] for row in rows if row["metric"] == "distance from the orders"}
    assert len(away) == 13
    assert all(0 < value < 1e-5 for value in away.values())
    assert "| made up, SGD | 0 |" in orders.table(rows)
