"""Simulated workers: lost packets are zeros, kept gradients are applied later, and sums are those that were counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from benchmarks.papers.thc.simulated_training import EpochSync, Replica, Task, train
from benchmarks.papers.thc.simulated_workers import (
    Delivery,
    Dense,
    DenseSums,
    Encoder,
    IntegerSums,
    LeftOut,
    Lossy,
    PacketLoss,
    Reencoded,
    Stragglers,
)

from gradwire.compressors import make

WORKERS, SIZE, BLOCK = 5, 300, 64
PACKETS = 5  # the last one of 44 elements


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, since these operations are too small for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Given:
    """Deliveries chosen by a test."""

    there: np.ndarray
    back: np.ndarray
    diverges = True

    def draw(self, step: int, num_workers: int, num_packets: int) -> Delivery:
        assert (num_workers, num_packets) == self.there.shape == self.back.shape
        return Delivery(self.there, self.back)


def everything() -> np.ndarray:
    return np.ones((WORKERS, PACKETS), bool)


def grads(step: int = 0, workers: int = WORKERS) -> list[torch.Tensor]:
    return [
        torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank)) + rank for rank in range(workers)
    ]


def thc(**options) -> IntegerSums:
    return IntegerSums(make("thc", granularity=30, block=BLOCK), WORKERS, SIZE, 7, **options)


def dense(**options) -> DenseSums:
    return DenseSums(WORKERS, SIZE, packet=BLOCK, **options)


def held(aggregator: Lossy) -> np.ndarray:
    """All that residuals hold, of the sum of gradients over n."""
    if isinstance(aggregator, DenseSums):
        return aggregator.kept.sum(0)
    assert isinstance(aggregator, IntegerSums)
    return sum(worker.residuals.total()["model"] for worker in aggregator.workers)


def test_a_lost_reply_is_a_gradient_of_zero_in_its_block_and_nowhere_else():
    back = everything()
    back[2, [1, 4]] = False
    whole = thc().means(grads(), 0)
    aggregator = thc(faults=Given(everything(), back))
    found = aggregator.means(grads(), 0)
    assert all(torch.equal(each, whole[0]) for rank, each in enumerate(found) if rank != 2)
    expected = whole[0].clone()
    expected[64:128] = expected[256:300] = 0
    assert torch.equal(found[2], expected)
    assert aggregator.lost.tolist() == [0, 0, 2, 0, 0]
    # A lane of zero would be the lowest value of the table for each worker: far from a gradient of zero.
    worker, ctx = aggregator.workers[0], aggregator.workers[0].context(0)
    stats = aggregator._preliminary_round(grads(), 0)
    lanes = np.zeros(320, np.uint8)
    low = worker.codec.finalize_blocks(lanes, WORKERS, ctx, stats, torch.empty(SIZE))
    assert low[64:128].norm() > 2 * whole[0][64:128].norm()


def test_a_packet_that_does_not_arrive_is_in_no_sum_and_the_divisor_is_true():
    there = everything()
    there[[0, 3], 1] = False
    there[:, 3] = False
    found = thc(faults=Given(there, everything())).means(grads(), 0)[0]
    aggregator = thc()
    whole = aggregator.means(grads(), 0)[0]
    assert torch.equal(found[:64], whole[:64]) and torch.equal(found[128:192], whole[128:192])
    assert not found[192:256].any()  # nobody's
    other, again = thc(), grads()
    stats = other._preliminary_round(again, 0)
    decoded = [
        worker.codec.decode(worker.encode(grad, 0, stats), worker.context(0), stats=stats) * WORKERS
        for worker, grad in zip(other.workers, again, strict=True)
    ]
    expected = (decoded[1] + decoded[2] + decoded[4])[64:128] / 3
    torch.testing.assert_close(found[64:128], expected)


@pytest.mark.parametrize("of", [thc, dense])
@pytest.mark.parametrize("divisor", ["all", "counted"])
def test_what_is_kept_is_applied_or_held(divisor, of):
    """Over the steps: gradients over n are what means have brought, by how many they are of, and all residuals."""
    rng = np.random.default_rng(0)
    produced = applied = np.zeros(SIZE)
    there = everything()
    aggregator = of(faults=Given(there, everything()), left_out=LeftOut(keep=True, divisor=divisor))
    for step in range(12):
        there[:] = rng.random(there.shape) < 0.6
        given = grads(step)
        mean = aggregator.means(given, step)[0].double().numpy()
        counts = np.repeat(there.sum(0), BLOCK)[:SIZE]
        applied = applied + mean * (counts / WORKERS if divisor == "counted" else 1)
        produced = produced + sum(grad.double().numpy() for grad in given) / WORKERS
    np.testing.assert_allclose(applied + held(aggregator), produced, atol=2e-4)


def test_what_is_dropped_is_gone():
    there = everything()
    there[0] = False
    dropped, kept = (thc(faults=Given(there, everything()), left_out=LeftOut(keep=keep)) for keep in (False, True))
    assert torch.equal(dropped.means(grads(), 0)[0], kept.means(grads(), 0)[0])
    own = grads()[0].double().numpy() / WORKERS
    np.testing.assert_allclose(kept.workers[0].residuals.total()["model"], own, atol=1e-6)
    assert np.linalg.norm(dropped.workers[0].residuals.total()["model"]) < 0.7 * np.linalg.norm(own)
    assert all(
        np.array_equal(a.residuals.total()["model"], b.residuals.total()["model"])
        for a, b in zip(dropped.workers[1:], kept.workers[1:], strict=True)
    )


def test_a_control_loses_the_same_packets_and_nothing_else():
    whole = dense().means(grads(), 0)[0]
    torch.testing.assert_close(whole, Dense(WORKERS).means(grads(), 0)[0])
    there, back = everything(), everything()
    there[[0, 3], 1], back[2, 4] = False, False
    found, compressed = (of(faults=Given(there, back)).means(grads(), 0) for of in (dense, thc))
    expected = whole.clone()
    expected[64:128] = torch.stack([grads()[rank] for rank in (1, 2, 4)]).mean(0)[64:128]
    torch.testing.assert_close(found[0], expected)
    expected[256:] = 0
    torch.testing.assert_close(found[2], expected)
    assert not compressed[2][256:].any() and compressed[2][:256].all()


def test_faults_are_what_they_are_called():
    there, back = PacketLoss(0.1, 3).draw(5, 200, 100)
    assert 0.09 < 1 - there.mean() < 0.11 and 0.09 < 1 - back.mean() < 0.11 and not np.array_equal(there, back)
    assert not np.array_equal(there, PacketLoss(0.1, 3).draw(6, 200, 100).there)
    late = np.stack([Stragglers(3, 1).draw(step, 10, 4).there for step in range(400)])
    assert ((~late).sum(1) == 3).all() and (late.any(2) == late.all(2)).all()
    assert (np.abs((~late[:, :, 0]).mean(0) - 0.3) < 0.1).all()  # each worker as often as another


def test_uniform_thc_shares_both_ends_and_reencoding_has_a_residual_of_its_own():
    given, mean = grads(), torch.stack(grads()).mean(0)
    uniform = IntegerSums(make("uthc", bits=8, rotate="none"), WORKERS, SIZE, 7).means(given, 0)[0]
    assert (uniform - mean).norm() < 0.02 * mean.norm()
    both = Reencoded(make("topk", ratio=0.2), make("topk", ratio=0.1), WORKERS, SIZE, 7)
    found = both.means(given, 0)[0].double().numpy()
    assert np.count_nonzero(found) == 30
    encoders: list[Encoder] = [*both.workers, both.again]
    total = sum(encoder.residuals.total()["model"] for encoder in encoders)
    np.testing.assert_allclose(found + total, mean.double().numpy(), atol=1e-5)
    assert 32 * 0.2 < both.bits_there < 40 * 0.2 and 32 * 0.1 < both.bits_back < 40 * 0.1  # values and positions


class Line(Task):
    """Two classes on either side of a line."""

    name, num_epochs, num_samples, batch_size = "line", 2, 400, 8

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(500, 40, generator=generator)
        self.targets = (self.inputs[:, 0] > 0).long()

    def replica(self) -> Replica:
        model = torch.nn.Sequential(torch.nn.Linear(40, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
        return Replica(model, torch.optim.SGD(model.parameters(), momentum=0.9))

    def rate(self, progress: float, num_workers: int) -> float:
        return 0.3

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def right(self, model: torch.nn.Module, split: str, part: int, num_parts: int) -> tuple[int, int]:
        chosen = slice(0, 400) if split == "train" else slice(400, 500)
        found = model(self.inputs[chosen][part::num_parts]).argmax(1)
        return int((found == self.targets[chosen][part::num_parts]).sum()), len(found)


def test_workers_learn_alike_unless_packets_are_lost_and_synchronize():
    task, size = Line(), Line().size
    dense = train(task, Dense(WORKERS), 0)
    assert len(dense.losses) == 20 and dense.accuracy["test"] > 0.8 and dense.apart == 0

    def lossy(sync: EpochSync | None):
        codec = make("thc", granularity=30, block=64)
        return train(task, IntegerSums(codec, WORKERS, size, 0, faults=PacketLoss(0.2, 0)), 0, sync)

    apart = lossy(None)
    assert apart.apart > 0.01 and np.isfinite(apart.losses).all()
    assert 0.001 < lossy(EpochSync()).apart < apart.apart  # after an epoch, and before it ends with a copy
    assert lossy(None) == apart  # the same seeds, the same bits


def test_who_lost_packets_copies_who_lost_least():
    torch.manual_seed(0)
    replicas = [Line().replica() for _ in range(4)]
    before = [replica.flat() for replica in replicas]
    lost = np.array([3, 1, 0, 0])
    EpochSync()(replicas, lost)
    assert torch.equal(replicas[0].flat(), before[2]) and torch.equal(replicas[1].flat(), before[2])
    assert torch.equal(replicas[3].flat(), before[3]) and not lost.any()
