"""Training through a stand-alone aggregator: sums as by scatter-reduce, and no loss of late gradients."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.aggregator.process import AggregationOptions, AggregationServer
from gradwire.aggregator.request import Reply
from gradwire.aggregator.session import SessionConfig
from gradwire.core.errors import (
    DisagreementError,
    OptionError,
    PeerLostError,
    PeerTimeoutError,
    SyncError,
    UnknownNameError,
)
from gradwire.core.spec import TensorSpec
from gradwire.simulate.recording import record
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import Ranks, ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions

NUMEL, SEED = 9000, 3
PACKET = 2048
Gradient = Callable[[int, int], torch.Tensor]


def gradient(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def take_step(one: Synchronizer, step: int, make: Gradient = gradient, used: bool = True) -> torch.Tensor:
    one.begin_step()
    grad = make(one.rank, step) if used else torch.zeros(NUMEL)
    one.submit([GradientSlice("w", grad, used=used)])
    one.wait()
    one.commit()
    return grad


def held(one: Synchronizer) -> torch.Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for start, values in one.residuals.state_dict()["local"].get("w", {}).items():
        total[int(start) : int(start) + values.numel()] += values.double()
    return total


def group_of(world_size: int, codec: Any, aggregator: LocalAggregator, fraction: float = 1.0, **options: Any) -> Any:
    plan = Plan({"w": codec}, strategy="server", **options)
    server = LocalOptions("local:1", fraction=fraction, packet_elements=PACKET, aggregator=aggregator)
    return ranks(world_size, plan, seed=SEED, server=server, tensors={"w": TensorSpec((NUMEL,))})


def sums(aggregator: LocalAggregator) -> list[Reply]:
    """Replies about sums, in the order of steps."""
    return [reply for _, stream, reply in aggregator.replies if stream == 1]


def by_element(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.repeat(counts, PACKET)[:NUMEL])


# -- the same sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize(
    "codec", [gw.make("thc"), gw.make("thc", granularity=90, bits=3), gw.make("thc", rotate="full"), gw.make("uthc")],
    ids=repr,
)  # fmt: skip
def test_a_server_gives_the_bits_of_scatter_reduce(codec: gw.Compressor, world_size: int) -> None:
    """Owners add the same integers, except with `rotate="full"`, where ranges differ."""

    def run(one: Synchronizer) -> list[torch.Tensor]:
        return [take_step(one, step) for step in range(3)]

    with group_of(world_size, codec, LocalAggregator()) as group:
        by_server = group.each(run)
    specs = {"w": TensorSpec((NUMEL,))}
    with ranks(world_size, Plan({"w": codec}, strategy="scatter_reduce"), seed=SEED, tensors=specs) as group:
        between = group.each(run)
    for rank in range(world_size):
        for step, (found, expected) in enumerate(zip(by_server[rank], between[rank], strict=True)):
            assert torch.equal(found, by_server[0][step])
            exact = sum(gradient(each, step) for each in range(world_size)) / world_size
            assert (found - exact).norm() < 0.6 * exact.norm()
            assert codec.options["rotate"] == "full" or torch.equal(found, expected)


def test_a_model_with_large_and_small_tensors_trains_with_partitions() -> None:
    specs = {name: TensorSpec(shape) for name, shape in
             {"a": (100, 90), "b": (7,), "c": (64, 64), "d": (3, 5)}.items()}  # fmt: skip
    aggregator = LocalAggregator()
    plan = Plan(gw.make("thc"), strategy="server", partitions=2, min_elements=1000)
    assert {name: plan.entry(name, spec).strategy for name, spec in specs.items()} == {
        "a": "server", "b": "scatter_reduce", "c": "server", "d": "scatter_reduce",
    }  # fmt: skip

    def run(one: Synchronizer) -> list[torch.Tensor]:
        for step in range(2):
            one.begin_step()
            grads = [gradient(one.rank, step, spec.numel).view(spec.shape) for spec in specs.values()]
            one.submit([GradientSlice(name, grad) for name, grad in zip(specs, grads, strict=True)])
            one.wait()
            one.commit()
        return grads

    server = LocalOptions("local:1", aggregator=aggregator)
    with ranks(3, plan, server=server, tensors=specs) as group:
        found = group.each(run)
        reports = [one.report() for one in group.synchronizers]
    for name, *grads in zip(specs, *found, strict=True):
        exact = sum(gradient(rank, 1, specs[name].numel) for rank in range(3)).view(specs[name].shape) / 3
        assert all(torch.equal(grad, grads[0]) for grad in grads)
        assert (grads[0] - exact).norm() < (
            0.5 if plan.entry(name, specs[name]).strategy == "server" else 1e-6
        ) * exact.norm()
    assert aggregator.config is not None and len(aggregator.config.streams) == 2 * 2 * 2
    assert len(aggregator.replies) == 2 * len(aggregator.config.streams)
    row = reports[0].tensors["a"]
    assert row.method.endswith("server") and row.syncs == 2
    assert 2 * 9000 // 2 < row.sent_bytes < 2 * (9000 // 2 + 1000), "half a byte an element, and norms"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_element_types_travel(dtype: torch.dtype) -> None:
    def make(rank: int, step: int) -> torch.Tensor:
        return gradient(rank, step).to(dtype)

    server = LocalOptions("local:1")
    plan = Plan({"w": "thc"}, strategy="server")
    with ranks(2, plan, server=server, tensors={"w": TensorSpec((NUMEL,), dtype)}) as group:
        means = group.each(lambda one: take_step(one, 0, make))
    assert means[0].dtype == dtype and torch.equal(*means)
    exact = (make(0, 0) + make(1, 0)).float() / 2
    assert (means[0].float() - exact).norm() < 0.5 * exact.norm()


# -- who is counted -------------------------------------------------------------------------------------------------


def test_an_absent_rank_counts_as_a_gradient_of_zero_and_a_late_one_not_at_all() -> None:
    """Of five ranks one is absent and one late: the sum of three, divided by four."""
    codec, absent, late = gw.make("thc", granularity=30), 1, 3
    aggregator = LocalAggregator(lambda step, stream, packet, rank: rank == late and stream == 1)
    with group_of(5, codec, aggregator, fraction=0.8) as group:
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
    with group_of(5, codec, aggregator, fraction=0.6, feedback="none") as group:
        found = group.each(lambda one: take_step(one, 0, scaled))[0]
    for packet, missing in late.items():
        where = slice(packet * PACKET, min(NUMEL, (packet + 1) * PACKET))
        with group_of(5, codec, LocalAggregator(), feedback="none") as group:
            used = [rank not in missing for rank in range(5)]
            fewer = group.each(lambda one, used=used: take_step(one, 0, scaled, used[one.rank]))[0]
        expected = fewer[where] * np.float32(5 / (5 - len(missing))) if missing else fewer[where]
        assert torch.equal(found[where], expected), f"packet {packet}"


@pytest.mark.parametrize(("method", "feedback"), [("thc", None), ("uthc", "error"), ("uthc", None)])
def test_nothing_is_lost_in_sixty_steps_with_latecomers(method: str, feedback: str | None) -> None:
    """Conservation: each gradient is counted once. A mean is the sum of those counted over their number; so, weighted
    by the share of ranks that they are of, means and residuals add up to the mean of all gradients.
    """
    world_size, steps = 5, 60
    drawn = np.random.default_rng(7).random((steps, 2, 8, world_size))
    allowed = np.argsort(drawn, axis=-1) < 2  # two of five at most

    def late(step: int, stream: int, packet: int, rank: int) -> bool:
        return bool(allowed[step, stream, packet, rank]) and drawn[step, stream, packet, rank] < 0.4

    aggregator = LocalAggregator(late)

    def run(one: Synchronizer) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        produced, means = torch.zeros(NUMEL, dtype=torch.float64), []
        for step in range(steps):
            produced += gradient(one.rank, step).double() / world_size
            means.append(take_step(one, step))
        return produced, means, held(one)

    with group_of(world_size, method, aggregator, fraction=0.6, feedback=feedback) as group:
        found = group.each(run)
    replies, means = sums(aggregator), found[0][1]
    assert sum(int((reply.counts < world_size).sum()) for reply in replies) > steps, "many were late"
    for _, other, _ in found:
        assert all(torch.equal(left, right) for left, right in zip(means, other, strict=True))
    shares = [by_element(reply.counts / world_size) for reply in replies]
    applied = sum(share * mean.double() for share, mean in zip(shares, means, strict=True))
    produced, left = sum(each[0] for each in found), sum(each[2] for each in found)
    if (method, feedback) == ("uthc", None):  # without feedback until it was late once
        assert (applied + left - produced).norm() < 0.2 * produced.norm()
        return
    assert left.norm() > 0
    assert torch.allclose(applied + left, produced, rtol=0, atol=1e-4 * float(produced.abs().max()))


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

    there = gw.Aggregator(f"127.0.0.1:{server.address[1]}", fraction=0.75, packet_elements=PACKET)
    plan, specs = Plan({"w": "thc"}, strategy="server"), {"w": TensorSpec((NUMEL,))}
    with ranks(world_size, plan, seed=SEED, server=there, tensors=specs) as group:
        found = group.each(run)
        late = [one.report().total.late_elements for one in group.synchronizers]
    thread.join(30)
    assert not thread.is_alive(), "all have said goodbye"
    assert late == [NUMEL * steps // world_size] * world_size
    for _, means, _ in found:
        assert all(torch.equal(left, right) for left, right in zip(means, found[0][1], strict=True))
    applied = (world_size - 1) / world_size * sum(mean.double() for mean in found[0][1])
    produced, left = sum(each[0] for each in found), sum(each[2] for each in found)
    assert torch.allclose(applied + left, produced, rtol=0, atol=1e-4 * float(produced.abs().max()))


# -- gradients that are not finite ----------------------------------------------------------------------------------


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
        return torch.full((NUMEL,), huge if rank == 1 else 1.0) if step < 2 else torch.zeros(NUMEL)

    def run(one: Synchronizer) -> torch.Tensor:
        for step in range(3):
            one.begin_step()
            grad = make(one.rank, step)
            one.submit([GradientSlice("w", grad)])
            one.wait()
            one.commit()
            one.residuals.scale(2.0) if step == 0 else None
            if step == 1:
                assert held(one).abs().max() <= largest
                return grad
        raise AssertionError("unreachable")

    with group_of(3, gw.make("thc", granularity=30), aggregator, fraction=0.6) as group:
        means = group.each(run)
    assert all(mean.isfinite().all() and torch.equal(mean, means[0]) for mean in means)


# -- failures and refusals ------------------------------------------------------------------------------------------


def test_a_lost_server_ends_the_step_on_all_ranks_with_its_error() -> None:
    aggregator = LocalAggregator()

    def run(one: Synchronizer) -> list[Any]:
        take_step(one, 0)
        one.begin_step()
        if one.rank == 2:  # the others wait for it, and for the server
            aggregator.fail(PeerLostError("The connection to the aggregation server is lost."))

        def finish() -> None:
            one.submit([GradientSlice("w", gradient(one.rank, 1))])  # which another rank's error may forestall
            one.wait()

        with pytest.raises(SyncError) as caught:
            finish()
        with pytest.raises(SyncError) as again:
            one.begin_step()
        return [caught.value, again.value is caught.value]

    with group_of(3, "thc", aggregator) as group:
        found = group.each(run)
    for error, same in found:
        assert "the aggregation server" in str(error) and same
    # A rank that hears of it from another before it submits was between steps.
    assert any(error.tensor == "w" and "send" in error.phase for error, _ in found)


def test_a_dump_that_cannot_be_written_does_not_keep_the_failure_from_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "full").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    server, ends = AggregationServer(AggregationOptions(2)), []

    def serve() -> None:
        with pytest.raises(SyncError) as caught:
            server.run()
        ends.append(str(caught.value))

    thread = threading.Thread(target=serve)
    thread.start()
    plan, specs = Plan({"w": "thc"}, strategy="server"), {"w": TensorSpec((NUMEL,))}
    there = f"127.0.0.1:{server.address[1]}"
    with ranks(2, plan, server=there, tensors=specs, dump_dir=tmp_path / "full" / "dumps") as group:
        group.each(lambda one: take_step(one, 0))
        group.network.kill(1)
        with pytest.raises(PeerLostError, match=r"The flight recorder could not be written: .*full"):
            take_step(group.synchronizers[0], 1)
        thread.join(30)
    thread.join(30)
    assert ["gave up: The connection to rank 1 has ended" in end for end in ends] == [True]


@dataclass(frozen=True)
class OutOfReach(LocalOptions):
    """A server that rank 1 cannot reach."""

    def client(self, config: SessionConfig, rank: int, *how: Any) -> Any:
        if rank == 1:
            raise PeerTimeoutError("The aggregation server gave no connection.")
        return super().client(config, rank, *how)


def test_a_rank_that_does_not_reach_the_server_tells_the_others() -> None:
    with ranks(3, Plan({"w": "thc"}, strategy="server"), server=OutOfReach("local:1")) as group:
        found = group.outcomes(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        assert [type(error) for error in found] == [type(None), PeerTimeoutError, type(None)]
        for rank, error in enumerate(group.outcomes(lambda one: take_step(one, 0))):
            assert isinstance(error, SyncError)
            assert rank == 1 or "The aggregation server gave no connection" in str(error)


@pytest.mark.parametrize(("rules", "strategy"), [({"w": "threelc"}, "server"), ({"*": "int8shared"}, "server")])
def test_what_a_server_cannot_add_is_refused_with_advice(rules: Any, strategy: str) -> None:
    with pytest.raises(OptionError, match=r'pass "thc" or "uthc", or choose .* such as "scatter_reduce"'):
        Plan(rules, strategy=strategy)
    for compressor in (gw.make("threelc"), gw.make("none")):
        with pytest.raises(OptionError, match="looks indices up and adds"):
            Plan.of_entries({"w": PlanEntry(compressor, "server")})


def outcomes(group: Ranks, function: Callable[[Synchronizer], Any]) -> list[str]:
    return [str(error) for error in group.outcomes(function)]


def test_a_missing_server_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_AGGREGATOR", raising=False)
    with ranks(2, Plan({"w": "thc"}, strategy="server")) as group:
        for said in outcomes(group, lambda one: one.register({"w": TensorSpec((NUMEL,))})):
            assert 'options=gradwire.SyncOptions(server="host:port") or set GRADWIRE_AGGREGATOR' in said
    monkeypatch.setenv("GRADWIRE_AGGREGATOR", "there:7071")
    assert gw.Aggregator.of(None) == gw.Aggregator("there:7071")


def test_ranks_with_different_server_options_disagree_before_anything_is_sent() -> None:
    plan, aggregator = Plan({"w": "thc"}, strategy="server"), LocalAggregator()
    with (
        pytest.raises(DisagreementError, match="fraction"),
        ranks(2, plan, server=lambda rank: LocalOptions("local:1", fraction=(0.9, 1.0)[rank], aggregator=aggregator)),
    ):
        pass
    assert aggregator.config is None


def test_later_tensors_and_parts_of_tensors_are_refused() -> None:
    with group_of(2, "thc", LocalAggregator()) as group:
        for said in outcomes(group, lambda one: one.submit([GradientSlice("w", torch.zeros(1024))])):
            assert "but 1024 were submitted. Submit full tensors" in said
    with ranks(2, Plan({"*": "thc"}, strategy="server"), server=LocalOptions("local:1")) as group:
        group.each(lambda one: one.register({"w": TensorSpec((300, 300))}))
        for said in outcomes(group, lambda one: one.register({"v": TensorSpec((300, 300))})):
            assert "Register all tensors that use it at once" in said
        group.each(lambda one: one.register({"bias": TensorSpec((300,))}))  # travels between ranks


def test_full_rotation_is_refused_if_ranks_may_be_late() -> None:
    full = gw.make("thc", rotate="full")
    with (
        pytest.raises(OptionError, match='Pass rotate="block", or fraction=1'),
        group_of(3, full, LocalAggregator(), 0.6),
    ):
        pass
    aggregator = LocalAggregator()
    with group_of(3, gw.make("thc", block=4096), aggregator, fraction=0.6):
        assert aggregator.config is not None and aggregator.config.packet_elements == 4096


@pytest.mark.parametrize("codec", [gw.make("thc", rotate="full"), gw.make("thc", block=4096)], ids=repr)
def test_packets_need_not_be_whole_blocks_if_no_rank_is_left_out(codec: gw.Compressor) -> None:
    means = []
    for fraction in (0.9, 1.0):  # of 2 ranks, both are all
        aggregator = LocalAggregator()
        with group_of(2, codec, aggregator, fraction=fraction) as group:
            assert aggregator.config is not None and aggregator.config.packet_elements == PACKET
            means.append(group.each(lambda one: [take_step(one, step) for step in range(2)])[0])
    for found, expected in zip(*means, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("world_size", "fraction", "advice"),
    [(4, 0.9, "fraction=0.75, or 1"), (3, 0.7, "fraction=0.666, or 1"), (2, 0.6, r"Pass fraction=1\.")],
)
def test_a_fraction_that_leaves_no_rank_out_logs_one_that_does(
    world_size: int, fraction: float, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with group_of(world_size, "thc", LocalAggregator(), fraction=fraction):
        assert re.search(advice, caplog.text)
    for number in re.findall(r"fraction=(0\.\d+)", caplog.text)[:1]:
        caplog.clear()
        with group_of(world_size, "thc", LocalAggregator(), fraction=float(number)):
            assert "leaves no rank out" not in caplog.text


def test_the_simulator_takes_only_strategies_between_ranks() -> None:
    with pytest.raises(UnknownNameError, match="Known: allgather, hierarchical, ring, scatter_reduce"):
        record(PlanEntry(gw.make("thc"), "server"), NUMEL, 0, 2)
