"""An aggregator's address, options and streams: what is refused, with advice."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.core.errors import DisagreementError, OptionError, UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.aggregator.served_ranks import NUMEL, PACKET, group_of, take_step
from tests.sync.harness import Ranks, ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions


def outcomes(group: Ranks, function: Callable[[Synchronizer], Any]) -> list[str]:
    return [str(error) for error in group.outcomes(function)]


def test_a_missing_server_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_AGGREGATOR", raising=False)
    with ranks(2, Plan({"w": "thc"}, strategy="server")) as group:
        for said in outcomes(group, lambda one: one.register({"w": TensorSpec((NUMEL,))})):
            assert 'options=gradwire.SyncOptions(server="host:port") or set GRADWIRE_AGGREGATOR' in said
    monkeypatch.setenv("GRADWIRE_AGGREGATOR", "there:7071")
    assert gw.Aggregator.of(None) == gw.Aggregator("there:7071")
    monkeypatch.setenv("GRADWIRE_AGGREGATOR", "there:7071, [::1]:7072")
    several = gw.Aggregator.of(None)
    assert several is not None and several.addresses == [("there", 7071), ("::1", 7072)]


def test_servers_are_a_sequence_or_a_text() -> None:
    for given in ("a:1,b:2", ["a:1", "b:2"], ("a:1", "b:2")):
        found = gw.Aggregator.of(given)
        assert found is not None and found.describe() == gw.Aggregator("a:1, b:2").describe()
    with pytest.raises(OptionError, match='"host:port", or '):
        gw.Aggregator([])
    with pytest.raises(OptionError, match="'there' is not an address"):
        gw.Aggregator("there")


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("fraction", (0.9, 1.0)),
        ("late", ("kept", "dropped")),
        ("divide_by", ("all", "counted")),
        ("fill_after", (None, timedelta(seconds=0.1))),
    ],
)
def test_ranks_with_different_server_options_disagree_before_anything_is_sent(option: str, values: Any) -> None:
    plan, aggregator = Plan({"w": "thc"}, strategy="server"), LocalAggregator()
    with (
        pytest.raises(DisagreementError, match=option),
        ranks(2, plan, server=lambda rank: LocalOptions("local:1", aggregator=aggregator, **{option: values[rank]})),
    ):
        pass
    assert aggregator.config is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [("a:1", r"servers\) = 2 on rank 0 and 1"), ("b:2,a:1", r"servers\[0\] = 'a:1' on rank 0 and 'b:2'")],
)
def test_ranks_with_different_lists_of_servers_disagree_with_advice(other: str, difference: str) -> None:
    plan, aggregator = Plan({"w": "thc"}, strategy="server"), LocalAggregator()
    with (
        pytest.raises(DisagreementError, match=difference + ".* same model, method and options on every rank"),
        ranks(2, plan, server=lambda rank: LocalOptions(("a:1,b:2", other)[rank], aggregator=aggregator)),
    ):
        pass
    assert aggregator.config is None


def test_unknown_policies_are_reported_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"late policy of an aggregator 'drop'.* Known: dropped, kept"):
        gw.Aggregator("there:7071", late="drop")
    with pytest.raises(UnknownNameError, match="Known: all, counted"):
        gw.Aggregator("there:7071", divide_by="ranks")


def test_a_rank_that_may_fill_keeps_nothing_that_was_late() -> None:
    with pytest.raises(
        OptionError, match=r'cannot keep it\. With fill_after and fraction below 1, pass late="dropped"'
    ):
        gw.Aggregator("there:7071", fraction=0.75, fill_after=timedelta(seconds=0.1))
    with pytest.raises(OptionError, match=r"Pass timedelta\(seconds=0.1\), or leave it out"):
        gw.Aggregator("there:7071", fill_after=timedelta(0))
    assert gw.Aggregator("there:7071", fraction=0.75, late="dropped", fill_after=timedelta(1)).replicas_may_differ


def test_later_tensors_and_parts_of_tensors_are_refused() -> None:
    with group_of(2, "thc", LocalAggregator()) as group:
        for said in outcomes(group, lambda one: one.submit([GradientSlice("w", torch.zeros(1024))])):
            assert "but 1024 were submitted. Submit full tensors" in said
    with ranks(2, Plan({"*": "thc"}, strategy="server"), server=LocalOptions("local:1")) as group:
        group.each(lambda one: one.register({"w": TensorSpec((300, 300))}))
        for said in outcomes(group, lambda one: one.register({"v": TensorSpec((300, 300))})):
            assert "Register all tensors that use it at once" in said
        group.each(lambda one: one.register({"bias": TensorSpec((300,))}))  # travels between ranks


def test_a_plan_with_tensors_that_the_server_does_not_know_is_refused_and_the_ranks_go_on() -> None:
    plan = Plan({"w": "thc", "*": "none"}, strategy="server")
    specs = {name: TensorSpec((300, 300)) for name in ("w", "v")}

    def run(one: Synchronizer) -> None:
        for _ in range(2):
            one.begin_step()
            one.submit([GradientSlice(name, torch.ones(300, 300)) for name in specs]).wait()
            one.commit()
            with pytest.raises(OptionError, match="Register all tensors that use it at once"):
                one.replan(Plan({"*": "thc"}, strategy="server"))
            assert one.plan is plan

    with ranks(2, plan, server=LocalOptions("local:1"), tensors=specs) as group:
        group.each(run)


def test_full_rotation_is_refused_if_ranks_may_be_late() -> None:
    full = gw.make("thc", rotate="full")
    with (
        pytest.raises(OptionError, match=r'which fraction=0\.6 needs\. Pass rotate="block", or leave the option out'),
        group_of(3, full, LocalAggregator(), 0.6),
    ):
        pass
    with (
        pytest.raises(OptionError, match=r"which fill_after=0\.1 s needs"),
        group_of(3, full, LocalAggregator(), fill_after=timedelta(seconds=0.1)),
    ):
        pass
    aggregator = LocalAggregator()
    with group_of(3, gw.make("thc", block=4096), aggregator, fraction=0.6):
        assert aggregator.config is not None and aggregator.config.packet_elements == 4096


def test_packets_shorter_than_a_block_are_refused_if_ranks_may_be_late() -> None:
    wide, narrow = gw.make("thc", granularity=90), gw.make("thc", granularity=90, block=512)
    advice = (
        r"whole blocks of 1024, but with mtu=1500 they have 512 .* Pass block=512 to the compressor, a mtu that fits"
    )
    with pytest.raises(OptionError, match=advice), group_of(3, wide, LocalAggregator(), 0.6, mtu=1500):
        pass
    aggregator = LocalAggregator()
    with group_of(3, narrow, aggregator, 0.6, mtu=1500):
        assert aggregator.config is not None and aggregator.config.packet_size(1) == 512


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
