"""Training through a stand-alone aggregator: the sums of scatter-reduce, and errors that reach all ranks."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.aggregator.options import AggregationOptions
from gradwire.aggregator.process import AggregationServer
from gradwire.aggregator.session import SessionConfig
from gradwire.core.errors import OptionError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.aggregator.served_ranks import NUMEL, SEED, gradient, group_of, take_step
from tests.sync.harness import ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize(
    "codec",
    [gw.make("thc"), gw.make("thc", granularity=90, bits=3), gw.make("thc", rotate="full"), gw.make("uthc"),
     *(gw.make("thc", block=block) for block in (256, 2048, 4096)),
     gw.make("uthc", block=4096, rotate="none")],
    ids=repr,
)  # fmt: skip
def test_a_server_gives_the_bits_of_scatter_reduce_and_of_a_ring(codec: gw.Compressor, world_size: int) -> None:
    """The same integers are added, except with `rotate="full"`, where blocks follow from the ranges."""

    def run(one: Synchronizer) -> list[torch.Tensor]:
        return [take_step(one, step) for step in range(3)]

    def between_ranks(strategy: str) -> list[list[torch.Tensor]]:
        plan, specs = Plan({"w": codec}, strategy=strategy), {"w": TensorSpec((NUMEL,))}
        with ranks(world_size, plan, seed=SEED, tensors=specs) as group:
            return group.each(run)

    with group_of(world_size, codec, LocalAggregator()) as group:
        by_server = group.each(run)
    scattered, ring = between_ranks("scatter_reduce"), between_ranks("ring")
    for rank in range(world_size):
        for step, found in enumerate(by_server[rank]):
            assert torch.equal(found, by_server[0][step])
            exact = sum(gradient(each, step) for each in range(world_size)) / world_size
            assert (found - exact).norm() < 0.6 * exact.norm()
            if codec.options["rotate"] != "full":
                assert torch.equal(found, scattered[rank][step]) and torch.equal(found, ring[rank][step])


@pytest.mark.parametrize("codec", [gw.make("thc"), gw.make("uthc", rotate="full")], ids=repr)
def test_several_servers_give_the_bits_of_one(codec: gw.Compressor) -> None:
    """Tensors of several packets and of less than one, over TCP and UDP with losses, at 1, 2 and 3 servers."""
    specs = {name: TensorSpec((numel,)) for name, numel in {"a": NUMEL, "b": 2100, "c": 300, "d": 5000}.items()}

    def run(one: Synchronizer) -> list[torch.Tensor]:
        for step in range(2):
            one.begin_step()
            grads = [gradient(one.rank, step, spec.numel) for spec in specs.values()]
            one.submit([GradientSlice(name, grad) for name, grad in zip(specs, grads, strict=True)])
            one.wait()
            one.commit()
        return grads

    found = []
    for transports in ((False,), (False, False), (True, False, True)):
        servers = [AggregationServer(AggregationOptions(2, udp=udp, drop=0.1 * udp)) for udp in transports]
        threads = [threading.Thread(target=server.run, args=(lambda text: None,)) for server in servers]
        for thread in threads:
            thread.start()
        there = gw.Aggregator([f"127.0.0.1:{server.address[1]}" for server in servers], packet_elements=2048)
        plan = Plan(dict.fromkeys(specs, codec), strategy="server")
        with ranks(2, plan, server=there, seed=SEED, tensors=specs) as group:
            found.append(group.each(run)[0])
            assert group.synchronizers[0].report().total.sent_bytes > 2 * sum(each.numel for each in specs.values()) / 2
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "all have said goodbye"
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


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


def test_a_lost_server_ends_the_step_on_all_ranks_with_its_error() -> None:
    aggregator, begun = LocalAggregator(), threading.Barrier(3, timeout=60)

    def run(one: Synchronizer) -> list[Any]:
        take_step(one, 0)
        one.begin_step()
        begun.wait()
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


def test_one_of_two_servers_that_ends_is_named_on_all_ranks_and_ends_the_other() -> None:
    servers, ends = [AggregationServer(AggregationOptions(2)) for _ in range(2)], {}

    def serve(number: int) -> None:
        with pytest.raises(SyncError) as caught:
            servers[number].run()
        ends[number] = str(caught.value)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    addresses = [f"127.0.0.1:{server.address[1]}" for server in servers]
    there, specs = gw.Aggregator(addresses, packet_elements=2048), {"w": TensorSpec((NUMEL,))}
    with ranks(2, Plan({"w": "thc"}, strategy="server"), server=there, tensors=specs) as group:
        group.each(lambda one: take_step(one, 0))
        servers[1].stop("Its machine is needed.")
        threads[1].join(30)
        for error in group.outcomes(lambda one: take_step(one, 1)):
            assert isinstance(error, SyncError)
            assert f"The aggregation server at {addresses[1]} has ended" in str(error)
        threads[0].join(30)
    assert "Its machine is needed." in ends[0] and "Its machine is needed." in ends[1]


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

    error: type[Exception] = PeerTimeoutError

    def client(self, config: SessionConfig, rank: int, *how: Any) -> Any:
        if rank == 1:
            raise self.error("The aggregation server gave no connection.")
        return super().client(config, rank, *how)


@pytest.mark.parametrize("kind", [PeerTimeoutError, OptionError, OSError])  # OSError: there are too many open files
def test_a_rank_that_does_not_reach_the_server_tells_the_others(kind: type[Exception]) -> None:
    with ranks(3, Plan({"w": "thc"}, strategy="server"), server=OutOfReach("local:1", error=kind)) as group:
        found = group.outcomes(lambda one: one.register({"w": TensorSpec((NUMEL,))}))
        assert [type(error) for error in found] == [type(None), kind, type(None)]
        engine = group.synchronizers[1]._engine
        assert engine is not None and not any(thread.is_alive() for thread in engine._threads)
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
