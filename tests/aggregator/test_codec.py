"""Ranks that are absent, late or not finite: who is counted, and that nothing is lost."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.request import Reply
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Synchronizer
from tests.aggregator.served_ranks import NUMEL, PACKET, SEED, Gradient, gradient, group_of, take_step
from tests.sync.harness import ranks
from tests.sync.local_aggregator import Late, LocalAggregator


def held(one: Synchronizer) -> torch.Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for start, values in one.residuals.state_dict()["local"].get("w", {}).items():
        total[int(start) : int(start) + values.numel()] += values.double()
    return total


def sums(aggregator: LocalAggregator) -> list[Reply]:
    """Replies about sums, in the order of steps."""
    return [reply for _, stream, reply in aggregator.replies if stream == 1]


def by_element(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.repeat(counts, PACKET)[:NUMEL])


def test_an_absent_rank_counts_as_a_gradient_of_zero_and_a_late_one_not_at_all() -> None:
    """Of five ranks one is absent and one late: the sum of three, divided by four."""
    codec, absent, late = gw.make("thc", granularity=30), 1, 3
    aggregator = LocalAggregator(lambda step, stream, packet, rank: rank == late and stream == 1)
    with group_of(5, codec, aggregator, fraction=0.8, divide_by="counted") as group:
        means = group.each(lambda one: take_step(one, 0, used=one.rank != absent))
        kept = group.each(held)
        reports = [one.report().total for one in group.synchronizers]
    exact = sum(gradient(rank, 0) for rank in (0, 2, 4)) / 4
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert (means[0] - exact).norm() < 0.3 * exact.norm()
    assert not kept[absent].any()
    # In units of the mean of all five, its whole gradient; the others what coding took.
    assert torch.allclose(kept[late], gradient(late, 0).double() / 5, rtol=1e-5, atol=1e-6)
    assert kept[2].norm() < 0.5 * gradient(2, 0).norm() / 5
    assert [report.late_elements for report in reports] == [0, 0, 0, NUMEL, 0]


def test_an_unused_parameter_gets_a_mean_of_zero() -> None:
    aggregator = LocalAggregator()
    with group_of(3, "thc", aggregator) as group:
        means = group.each(lambda one: take_step(one, 0, used=False))
    assert not any(mean.any() for mean in means)
    assert sums(aggregator) == []


def test_the_sum_of_the_counted_ranks_is_that_of_a_group_of_them() -> None:
    """The same bits as in a group where the others have nothing to add, except for the divisor."""
    late = {0: (4,), 1: (), 2: (1, 4), 3: (2,), 4: (1,)}  # by packet
    aggregator = LocalAggregator(lambda step, stream, packet, rank: stream == 1 and rank in late[packet])
    codec = gw.make("thc", granularity=30)
    # Norms of the others, which they have told in time, are below those of rank 0.
    scaled: Gradient = lambda rank, step: gradient(0, 10 + rank) * (3.0 if rank == 0 else 0.5)  # noqa: E731
    with group_of(5, codec, aggregator, fraction=0.6, divide_by="counted", feedback="none") as group:
        found = group.each(lambda one: take_step(one, 0, scaled))[0]
    for packet, missing in late.items():
        where = slice(packet * PACKET, min(NUMEL, (packet + 1) * PACKET))
        with group_of(5, codec, LocalAggregator(), feedback="none") as group:
            used = [rank not in missing for rank in range(5)]
            fewer = group.each(lambda one, used=used: take_step(one, 0, scaled, used[one.rank]))[0]
        expected = fewer[where] * np.float32(5 / (5 - len(missing))) if missing else fewer[where]
        assert torch.equal(found[where], expected), f"packet {packet}"


STEPS = 60
DRAWN = np.random.default_rng(7).random((STEPS, 2, 8, 5))
MAY_BE_LATE = np.argsort(DRAWN, axis=-1) < 2  # two of five at most


def drawn_late(step: int, stream: int, packet: int, rank: int) -> bool:
    """Who is late in trainings of five ranks."""
    return bool(MAY_BE_LATE[step, stream, packet, rank]) and DRAWN[step, stream, packet, rank] < 0.4


@pytest.mark.parametrize("divide_by", ["all", "counted"])
@pytest.mark.parametrize(("method", "feedback"), [("thc", None), ("uthc", "error"), ("uthc", None)])
def test_nothing_is_lost_in_sixty_steps_with_latecomers(method: str, feedback: str | None, divide_by: str) -> None:
    """Conservation: each gradient is counted once. Divided by all, means and residuals add up to the mean of all
    gradients. Divided by the counted, the same holds with each mean weighted by its share of the ranks.
    """
    world_size, steps = 5, STEPS
    aggregator = LocalAggregator(drawn_late)

    def run(one: Synchronizer) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        produced, means = torch.zeros(NUMEL, dtype=torch.float64), []
        for step in range(steps):
            produced += gradient(one.rank, step).double() / world_size
            means.append(take_step(one, step))
        return produced, means, held(one)

    with group_of(world_size, method, aggregator, fraction=0.6, divide_by=divide_by, feedback=feedback) as group:
        found = group.each(run)
    replies, means = sums(aggregator), found[0][1]
    assert sum(int((reply.counts < world_size).sum()) for reply in replies) > steps, "many were late"
    for _, other, _ in found:
        assert all(torch.equal(left, right) for left, right in zip(means, other, strict=True))
    shares = [by_element(reply.counts / world_size if divide_by == "counted" else np.ones(5)) for reply in replies]
    applied = sum(share * mean.double() for share, mean in zip(shares, means, strict=True))
    produced, left = sum(each[0] for each in found), sum(each[2] for each in found)
    if (method, feedback) == ("uthc", None):  # what coding takes is lost, what was late is not
        with group_of(world_size, method, LocalAggregator(), fraction=0.6, feedback=feedback) as group:
            without = group.each(run)
        noise = (sum(without[0][1]).double() - sum(each[0] for each in without)).norm()
        assert (applied + left - produced).norm() < 1.3 * noise < 0.4 * produced.norm()
        return
    assert left.norm() > 0
    assert torch.allclose(applied + left, produced, rtol=0, atol=1e-4 * float(produced.abs().max()))


@pytest.mark.parametrize("divide_by", ["all", "counted"])
def test_dropped_residuals_are_those_of_a_job_without_latecomers_and_only_late_payloads_are_lost(
    divide_by: str,
) -> None:
    """Bit for bit, also of ranks that were late. A mean lacks what the late payloads stand for, and nothing else."""

    def run(one: Synchronizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        means, kept = [], []
        for step in range(STEPS):
            means.append(take_step(one, step))
            kept.append(held(one))
        return means, kept

    def late_in_sums(step: int, stream: int, packet: int, rank: int) -> bool:
        return stream == 1 and drawn_late(step, stream, packet, rank)

    dropping = LocalAggregator(late_in_sums)
    with group_of(5, "thc", dropping, fraction=0.6, late="dropped", divide_by=divide_by) as group:
        found = group.each(run)
        late = [one.report().total.late_elements for one in group.synchronizers]
    with group_of(5, "thc", LocalAggregator()) as group:
        expected = group.each(run)
    for (means, kept), (_, residuals) in zip(found, expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(kept, residuals, strict=True))
        assert all(torch.equal(left, right) for left, right in zip(means, found[0][0], strict=True))
    replies, num_late = sums(dropping), 0
    for reply, mean, full in zip(replies, found[0][0], expected[0][0], strict=True):
        whole = by_element(reply.counts == 5)
        assert torch.equal(mean[whole], full[whole])
        assert (mean[~whole] - full[~whole]).norm() > 0.1 * full[~whole].norm()
        num_late += int((5 - by_element(reply.counts)).sum())
    assert sum(late) == num_late > STEPS * NUMEL / 5


def test_a_dropped_payload_is_what_keeping_it_would_have_kept() -> None:
    """After one step in which a rank was late: its gradient is in its residual, or that of the payload is lost."""
    late, left = 3, {}
    for policy in ("kept", "dropped"):
        aggregator = LocalAggregator(lambda step, stream, packet, rank: rank == late and stream == 1)
        with group_of(5, "thc", aggregator, fraction=0.8, late=policy, divide_by="all") as group:
            mean = group.each(lambda one: take_step(one, 0))[0]
            left[policy] = mean.double() + sum(group.each(held))
    with group_of(5, "thc", LocalAggregator()) as group:
        full = group.each(lambda one: take_step(one, 0))[0]
        left["all in time"] = full.double() + sum(group.each(held))
    produced = sum(gradient(rank, 0).double() / 5 for rank in range(5))
    scale = float(produced.abs().max())
    assert torch.allclose(left["kept"], produced, rtol=0, atol=1e-5 * scale)
    assert torch.allclose(left["all in time"], produced, rtol=0, atol=1e-5 * scale)
    assert torch.allclose(produced - left["dropped"], (full - mean).double(), rtol=0, atol=1e-5 * scale)
    assert (produced - left["dropped"]).norm() > 0.9 * (gradient(late, 0) / 5).norm(), "it was not small"


@pytest.mark.parametrize("udp", [False, True])
def test_a_real_server_goes_on_without_the_slowest_rank_and_nothing_is_lost(udp: bool) -> None:
    """In each step, another rank submits after the others are done, and is left out of norms and sums."""
    world_size, steps = 4, 8
    options = AggregationOptions(world_size, udp=udp)
    server = AggregationServer(options)
    thread = threading.Thread(target=server.run)
    thread.start()
    done = [threading.Semaphore(0) for _ in range(steps)]

    def run(one: Synchronizer) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        produced, means = torch.zeros(NUMEL, dtype=torch.float64), []
        for step in range(steps):
            is_late = step % world_size == one.rank
            for _ in range(is_late * (world_size - 1)):
                assert done[step].acquire(timeout=30)
            produced += gradient(one.rank, step).double() / world_size
            means.append(take_step(one, step))
            if not is_late:
                done[step].release()
        return produced, means, held(one)

    address, divide_by = f"127.0.0.1:{server.address[1]}", "all" if udp else "counted"
    there = gw.Aggregator(address, fraction=0.75, divide_by=divide_by, packet_elements=PACKET)
    plan, specs = Plan({"w": "thc"}, strategy="server"), {"w": TensorSpec((NUMEL,))}
    with ranks(world_size, plan, seed=SEED, server=there, tensors=specs) as group:
        found = group.each(run)
        late = [one.report().total.late_elements for one in group.synchronizers]
    thread.join(30)
    assert not thread.is_alive(), "all have said goodbye"
    assert late == [NUMEL * steps // world_size] * world_size
    for _, means, _ in found:
        assert all(torch.equal(left, right) for left, right in zip(means, found[0][1], strict=True))
    share = 1.0 if divide_by == "all" else (world_size - 1) / world_size
    applied = share * sum(mean.double() for mean in found[0][1])
    produced, left = sum(each[0] for each in found), sum(each[2] for each in found)
    assert torch.allclose(applied + left, produced, rtol=0, atol=1e-4 * float(produced.abs().max()))


# -- zeros after a timeout -----------------------------------------------------------------------------------

SOON = timedelta(seconds=0.02)


def steps_of(one: Synchronizer, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Means and residuals of some steps."""
    means, kept = [], []
    for step in range(steps):
        means.append(take_step(one, step))
        kept.append(held(one))
    return means, kept


@pytest.mark.parametrize("late", [lambda *_: False, lambda step, stream, packet, rank: stream == 1 and rank == 4])
def test_a_rank_that_fills_loses_the_mean_of_the_packet_and_nothing_else(late: Late) -> None:
    """Residuals of all ranks, and all other means, are bit for bit those of a job in which nothing is filled."""
    steps, how = 12, {"fraction": 0.8, "late": "dropped", "divide_by": "all"}

    def lost(step: int, stream: int, packet: int, rank: int) -> bool:
        return stream == 1 and DRAWN[step, 0, packet, rank] < 0.2

    with group_of(5, "thc", LocalAggregator(late, lost), fill_after=SOON, **how) as group:
        found = group.each(lambda one: steps_of(one, steps))
        reports = [one.report().total for one in group.synchronizers]
    with group_of(5, "thc", LocalAggregator(late), **how) as group:
        expected = group.each(lambda one: steps_of(one, steps))
        num_late = [one.report().total.late_elements for one in group.synchronizers]
    for rank, ((means, kept), (full, residuals)) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(left, right) for left, right in zip(kept, residuals, strict=True))
        num_filled = 0
        for step in range(steps):
            filled = by_element(np.array([lost(step, 1, packet, rank) for packet in range(5)]))
            assert torch.equal(means[step], torch.where(filled, 0.0, full[step]))
            num_filled += int(filled.sum())
        assert reports[rank].filled_elements == num_filled > NUMEL
        assert reports[rank].late_elements <= num_late[rank], "who fills does not know"


def test_the_first_filled_sum_is_a_warning_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    aggregator = LocalAggregator(lost=lambda step, stream, packet, rank: step > 0 and stream == 1 and rank == 1)
    with group_of(3, "thc", aggregator, fill_after=SOON) as group:
        group.each(lambda one: steps_of(one, 4))
    (warning,) = [each.getMessage() for each in caplog.records if "fill_after" in each.getMessage()]
    assert "A sum of 'w' did not come within 0.02 s, and rank 1 took zeros" in warning
    assert "call handle.synchronize_replicas() after each epoch" in warning


@pytest.mark.parametrize(("num_servers", "fraction"), [(1, 1.0), (1, 0.75), (2, 1.0)])
def test_ranks_of_real_servers_that_lose_datagrams_fill_and_go_on(num_servers: int, fraction: float) -> None:
    """Means are those that others have, or zeros in whole packets."""
    world_size, steps = 4, 10
    servers = [AggregationServer(AggregationOptions(world_size, udp=True, drop=0.4)) for _ in range(num_servers)]
    threads = [threading.Thread(target=server.run) for server in servers]
    for thread in threads:
        thread.start()
    addresses = [f"127.0.0.1:{server.address[1]}" for server in servers]
    there = gw.Aggregator(addresses, fraction, late="dropped", fill_after=SOON / 8, packet_elements=PACKET)
    plan, specs = Plan({"w": "thc"}, strategy="server"), {"w": TensorSpec((NUMEL,))}
    with ranks(world_size, plan, seed=SEED, server=there, tensors=specs) as group:
        found = group.each(lambda one: steps_of(one, steps)[0])
        num_filled = sum(one.report().total.filled_elements for one in group.synchronizers)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "all have said goodbye"
    zeros = 0
    for step in range(steps):
        for start in range(0, NUMEL, PACKET):
            packets = [means[step][start : start + PACKET] for means in found]
            received = [packet for packet in packets if packet.any()]
            assert all(torch.equal(packet, received[0]) for packet in received)
            zeros += sum(packet.numel() for packet in packets if not packet.any())
    assert zeros == num_filled > 0


# -- gradients that are not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("unheard", [(), (0,), (1,)], ids=["heard", "late statistics", "late sum"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_rolled_back_on_all_ranks(unheard: tuple[int, ...], value: float) -> None:
    """Whether they hear of it by the statistics or by the sum."""
    aggregator = LocalAggregator(lambda step, stream, packet, rank: step == 1 and rank == 2 and stream in unheard)

    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        before = held(one)

        def bad(rank: int, step: int) -> torch.Tensor:
            grad = gradient(rank, step)
            grad[NUMEL // 2] = value if rank == 2 else 0.0
            return grad

        assert not take_step(one, 1, bad).isfinite().all()
        assert torch.equal(held(one), before)
        assert take_step(one, 2).isfinite().all()

    with group_of(5, "thc", aggregator, fraction=0.8) as group:
        group.each(run)


def test_an_unheard_gradient_that_is_not_finite_is_dropped_by_its_rank_only() -> None:
    aggregator = LocalAggregator(lambda step, stream, packet, rank: step == 1 and rank == 2)

    def run(one: Synchronizer) -> torch.Tensor:
        take_step(one, 0)
        before = held(one)
        mean = take_step(one, 1, lambda rank, step: gradient(rank, step) / (0.0 if rank == 2 else 1.0))
        assert torch.equal(held(one), before) == (one.rank == 2), "the others have coded theirs"
        assert take_step(one, 2).isfinite().all()
        return mean

    with group_of(5, "thc", aggregator, fraction=0.8) as group:
        means = group.each(run)
    exact = sum(gradient(rank, 1) for rank in (0, 1, 3, 4)) / 4
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert means[0].isfinite().all()
    assert (means[0] - exact).norm() < 0.5 * exact.norm()


def test_gradients_that_overflow_with_their_residual_are_clamped_to_float32() -> None:
    """The gradient is finite, but not its sum with the residual, and no rank hears of it."""
    huge, largest = 3e38, float(np.finfo(np.float32).max)
    aggregator = LocalAggregator(
        lambda step, stream, packet, rank: rank == 1 and (stream == 1 if step == 0 else step == 1)
    )

    def make(rank: int, step: int) -> torch.Tensor:
        return torch.full((NUMEL,), huge if rank == 1 else 1.0)

    def run(one: Synchronizer) -> torch.Tensor:
        take_step(one, 0, make)
        one.residuals.scale(2.0)
        mean = take_step(one, 1, make)
        assert held(one).abs().max() <= largest
        return mean

    with group_of(3, gw.make("thc", granularity=30), aggregator, fraction=0.6) as group:
        means = group.each(run)
    assert all(mean.isfinite().all() and torch.equal(mean, means[0]) for mean in means)


def test_a_mean_over_fewer_ranks_that_overflows_is_rolled_back() -> None:
    """The sum of three of five ranks is finite; what it stands for as a mean is not."""
    largest = float(np.finfo(np.float32).max)
    aggregator = LocalAggregator(lambda step, stream, packet, rank: step == 1 and stream == 1 and rank > 2)

    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(rank, step) if step != 1 else torch.where(gradient(0, step) > 0, largest, -largest)

    def run(one: Synchronizer) -> torch.Tensor:
        take_step(one, 0, make)
        before = held(one)
        mean = take_step(one, 1, make)
        assert torch.equal(held(one), before)
        assert take_step(one, 2, make).isfinite().all()
        return mean

    with group_of(5, "thc", aggregator, fraction=0.6) as group:
        means = group.each(run)
    assert means[0].isinf().any() and all(torch.equal(mean, means[0]) for mean in means)
