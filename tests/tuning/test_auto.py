"""What `auto` makes of figures; tests/integration runs it on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.events import Event
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.planner import PlannedTensor, PlanTable, fidelity, plan
from gradwire.planner.closed_forms import route
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.residuals import ResidualKey
from gradwire.tuning.auto import IN_VAIN, PASSES, Autopilot
from gradwire.tuning.candidates import NATIVE, NATIVE_BF16, NATIVE_FP16, Candidate, given_routes, native_step
from gradwire.tuning.change import MISFIT, MOMENTUM, MORE_TENSORS, SYNC_BOUND, change_of
from gradwire.tuning.choice import NATIVE_DOUBT, choose, fidelity_of, margin, worth_a_trial
from gradwire.tuning.step_clock import BucketTiming, Timing
from gradwire.tuning.trials import Script

LINK = LinkCosts(1e-4, 1e-7)
QUICK = LinearCost(0, 1e-10)
COSTS = Costs(
    4,
    (LINK,),
    {
        "none": CodecCosts(QUICK, QUICK, QUICK, payload_bytes=LinearCost(0, 4)),
        "fp16": CodecCosts(QUICK, QUICK, QUICK, payload_bytes=LinearCost(0, 2)),
    },
)
TIMING = Timing(1.0, 0.1, 0.8, 0.8, 0.4, 0.0, 0.0, (BucketTiming(("w",), 4_000_000, 0.0),), 8)


def table(spec: str) -> PlanTable:
    method = fidelity.RankedCompressor(spec, ("ring",))
    return plan([PlannedTensor("w", (1000, 1000))], COSTS, [method], rest=0.1, native=("fp32",))


def test_dense_candidates_have_the_highest_fidelity_and_ddps_own_wins_among_them() -> None:
    compressed = Candidate.of(table("fp16"))
    assert compressed.table is not None and compressed.table.compresses
    assert fidelity_of(NATIVE) > fidelity_of(NATIVE_FP16) > fidelity_of(compressed)
    dense = Candidate.of(table("none"))
    assert choose({NATIVE: 1.0, dense: 0.96}, margin) == NATIVE
    assert choose({NATIVE: 1.0, dense: 0.95}, margin) == dense


def test_each_candidate_must_beat_those_of_higher_fidelity_by_its_own_margin() -> None:
    compressed = Candidate.of(table("fp16"))
    assert choose({NATIVE: 1.0, NATIVE_FP16: 0.98}, margin) == NATIVE_FP16
    assert choose({NATIVE: 1.0, NATIVE_FP16: 0.995}, margin) == NATIVE
    assert choose({NATIVE: 1.0, compressed: 0.97}, margin) == NATIVE
    assert choose({NATIVE: 1.0, NATIVE_FP16: 0.9, compressed: 0.8}, margin) == compressed
    # The plan does not beat fp16 by enough, and must not keep it from beating fp32.
    assert choose({NATIVE: 1.0, NATIVE_FP16: 0.96, compressed: 0.955}, margin) == NATIVE_FP16
    assert choose({NATIVE: 1.0, compressed: 0.9}, margin, least=0.99) == NATIVE  # none is shorter than the computation


def test_plans_that_choose_the_same_are_the_same_candidate() -> None:
    one = table("fp16")
    other = replace(one, step=2 * one.step, rows=tuple(replace(row, encode=1.0) for row in one.rows))
    assert Candidate.of(one) == Candidate.of(other)
    moved = replace(one, rows=tuple(replace(row, partitions=row.partitions + 1) for row in one.rows))
    assert Candidate.of(one) != Candidate.of(moved)


@pytest.fixture(params=["exact", "near-lossless"])
def pilot(request: pytest.FixtureRequest) -> Iterator[Autopilot]:
    handle = gw.attach(DistributedDataParallel(nn.Linear(4, 4)), "auto", fidelity=request.param)
    assert handle.autopilot is not None
    yield handle.autopilot
    handle.detach()


def test_half_the_bytes_are_predicted_to_save_half_of_the_links_time(pilot: Autopilot) -> None:
    found = pilot._predict(table("fp16"), TIMING, COSTS)
    wire = 2 * 3 / 4 * TIMING.nbytes * LINK.seconds_per_byte
    if pilot.fidelity == "exact":
        assert NATIVE_FP16 not in found
    else:
        assert found[NATIVE] - found[NATIVE_FP16] == pytest.approx(wire / 2)


@pytest.mark.parametrize(("itemsize", "saved"), [(8, 3 / 4), (4, 1 / 2), (2, 0)])
def test_the_hook_saves_what_a_cast_to_16_bits_does(itemsize: int, saved: float) -> None:
    timing = replace(TIMING, buckets=(replace(TIMING.buckets[0], itemsize=itemsize),))
    wire = 2 * 3 / 4 * timing.nbytes * LINK.seconds_per_byte
    assert native_step(timing, COSTS) - native_step(timing, COSTS, "fp16") == pytest.approx(saved * wire)
    handle = gw.attach(DistributedDataParallel(nn.Linear(4, 4)), "auto")
    assert handle.autopilot is not None
    assert (NATIVE_FP16 in handle.autopilot._predict(table("fp16"), timing, COSTS)) == (saved > 0)
    handle.detach()


def test_tensors_that_are_given_share_links_with_those_to_decide_about() -> None:
    small = [f"a{index}" for index in range(8)]
    specs = {name: TensorSpec((64, 64)) for name in small} | {"c": TensorSpec((900, 1000)), "d": TensorSpec((9,))}
    plans = gw.Plan({"a*": "onebit", "c": "onebit", "d": "none"}).given_entries(specs)
    timing = replace(TIMING, buckets=(BucketTiming(("c", "d"), 4, 0.25), BucketTiming(tuple(small), 4, 0.5)))
    costs = replace(COSTS, codecs={**COSTS.codecs, "onebit": COSTS.codecs["fp16"]}, task=1e-3)
    found = {tensor.name: (tensor.ready, route) for tensor, route in given_routes(plans, specs, timing, costs)}
    assert {name: ready for name, (ready, _) in found.items()} == dict.fromkeys(small, 0.5) | {"c": 0.25, "d": 0.25}
    alone = route("onebit", plans["a0"].strategy, 1, 64 * 64, costs)
    assert found["a0"][1].busy < alone.busy, "it shares its tasks with others of its bucket"
    assert found["c"][1].seconds == route("onebit", plans["c"].strategy, 4, 900_000, costs).seconds
    assert [tensor.name for tensor, _ in given_routes(plans, specs, timing, COSTS)] == ["d"], "others were not measured"


def test_tensors_that_are_given_dense_cost_one_message_a_bucket() -> None:
    names = [f"n{index}" for index in range(20)]
    specs = {name: TensorSpec((500,)) for name in names}
    plans = gw.Plan({"n*": "none"}).given_entries(specs)
    timing = replace(
        TIMING, buckets=(BucketTiming(tuple(names[:15]), 4, 0.25), BucketTiming(tuple(names[15:]), 4, 0.5))
    )
    costs = replace(COSTS, task=1e-3)
    found = given_routes(plans, specs, timing, costs)
    assert [(tensor.ready, tensor.numel) for tensor, _ in found] == [(0.25, 7_500), (0.5, 2_500)]
    whole = route("none", plans["n0"].strategy, 4, 7_500, costs)
    assert found[0][1].seconds == whole.seconds and found[0][1].busy == whole.busy


def test_a_step_that_would_rest_is_none_of_the_scripts(pilot: Autopilot) -> None:
    """Ranks compare their replicas in some steps, which then do not rest."""
    passed: list[None] = []

    def script() -> Script[None]:
        while True:
            passed.append(None)
            yield

    pilot._script, pilot._rest_steps = script(), 2
    for expected in (0, 0, 1, 2):
        pilot.boundary()
        assert len(passed) == expected
    assert not pilot.rests()


@pytest.mark.parametrize("comes_again", [True, False])
def test_rests_count_the_buckets_of_the_last_step_only(pilot: Autopilot, comes_again: bool) -> None:
    """DDP may skip a bucket that no rank has used."""
    native, submit = pilot._native, Event("submit", 0.0, tensor="bucket 0", nbytes=8, detail={"sent_bytes": 8})
    row = {"bucket 0": (submit, Event("done", 0.0, 0.1, "bucket 0"))}
    native._last |= row
    native.begin()
    native._last |= row if comes_again else {}
    native.rested = 3
    counted: list[Event] = []
    stop = pilot._synchronizer.events.listen(counted.append)
    native.count_rested()
    stop()
    assert [event.nbytes for event in counted if event.kind == "submit"] == ([24] if comes_again else [])


@pytest.mark.parametrize(("step", "rests"), [(1.0, 27), (0.05, 60), (0.001, 108)])
def test_a_rest_takes_three_seconds_within_bounds(pilot: Autopilot, step: float, rests: int) -> None:
    next(pilot._watch(replace(TIMING, step=step), strikes=1, rival=1.0))
    assert pilot._rest_steps == rests


def test_auto_waits_for_a_bounded_number_of_steps(pilot: Autopilot) -> None:
    assert len(list(pilot._passes_while(lambda: True))) == PASSES
    assert list(pilot._passes_while(lambda: False)) == []


def test_residuals_that_no_step_sends_are_not_waited_for(pilot: Autopilot) -> None:
    """Those of a parameter that is not used, and what 16 bits cannot hold."""
    residuals, key = pilot._synchronizer.residuals, ResidualKey("weight", ElementRange(0, 4))
    assert list(pilot._flush()) == []
    residuals.add(key, np.full(4, 1.0, np.float32))
    assert len(list(pilot._flush())) == IN_VAIN
    pilot._settle = lambda: None  # until an optimizer steps
    script = pilot._flush()
    for passes in range(1, 8):
        next(script)
        residuals.stage(key)[:] = 0.0  # sent
        if passes == 7:  # the optimizer steps after seven backward passes
            residuals.commit()
    assert list(script) == []
    residuals.add(key, np.full(4, 1.0, np.float32))
    script = pilot._flush()
    next(script)
    residuals.stage(key)[:] = 2.0**-9  # what a 16-bit gradient cannot hold
    residuals.commit()
    assert len(list(script)) == IN_VAIN


@pytest.mark.parametrize(("kept", "now", "kind", "text"), [
    (TIMING, replace(TIMING, step=1.4), "step", "steps take 1.4"),
    (TIMING, replace(TIMING, step=0.7), "step", "steps take 700 ms"),
    (TIMING, replace(TIMING, link=0.1), "link", "frames are under way for 100 ms"),
    (TIMING, replace(TIMING, synchronizing=0.8 / SYNC_BOUND / 1.01), "synchronizing", "synchronizing takes"),
])  # fmt: skip
def test_a_change_has_a_kind_and_says_what_it_is(kept: Timing, now: Timing, kind: str, text: str) -> None:
    found = change_of(kept, now)
    assert found is not None
    assert found.kind == kind
    assert text in found.text


def test_small_changes_are_none() -> None:
    assert change_of(TIMING, replace(TIMING, step=1.2, synchronizing=1.2)) is None
    assert change_of(replace(TIMING, link=0.01), replace(TIMING, link=0.03)) is None


def test_ddps_own_in_fp16_does_not_lose_against_a_plan_by_its_prediction() -> None:
    planned = Candidate.of(table("fp16"))
    assert worth_a_trial(planned, 0.99, fastest=1.0) and not worth_a_trial(planned, 1.01, fastest=1.0)
    assert worth_a_trial(NATIVE_FP16, NATIVE_DOUBT - 0.01, fastest=1.0)
    assert not worth_a_trial(NATIVE_FP16, NATIVE_DOUBT, fastest=1.0)
    assert worth_a_trial(planned, 2.0, fastest=1.0, is_queued=True), "the prediction has what it would save"


def test_what_auto_chooses_cannot_be_given() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(OptionError, match=r"Leave them out, or name a compressor"):
        gw.attach(ddp, gw.Plan("auto", strategy="ring"))
    with pytest.raises(OptionError, match="Leave them out"):
        gw.Plan("auto", partitions=2)
    with pytest.raises(OptionError, match="Leave them out"):
        gw.Plan("auto", feedback="error")
    with pytest.raises(UnknownNameError, match="near-lossless"):
        gw.attach(ddp, "auto", fidelity="lossless")


def test_a_job_of_one_rank_has_nothing_to_decide() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    handle = gw.attach(ddp, "auto")
    for _ in range(20):
        ddp(torch.ones(1, 4)).sum().backward()
    assert handle.autopilot is not None
    assert handle.autopilot.current == NATIVE
    assert handle.autopilot.decisions == []
    assert handle.autopilot.settled
    handle.detach()


def inspects(pilot: Autopilot) -> Script[None]:
    """Takes samples of all steps, and looks at their range."""
    while True:
        pilot._looks = pilot._samples = True
        yield


@pytest.mark.parametrize(("made", "level", "known"), [
    (torch.optim.AdamW, "near-lossless", True),
    (torch.optim.AdamW, "exact", False),
    (torch.optim.NAdam, "balanced", False),
])  # fmt: skip
def test_gcomp_is_measured_with_the_users_own_optimizer_where_it_is_known(made, level, known) -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = made(ddp.parameters())
    handle = gw.attach(ddp, "auto", fidelity=level, optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    pilot._script = inspects(pilot)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(5, 40)).square().sum().backward()
        optimizer.step()
    assert pilot._sample is not None
    assert ("gcomp" in {method.spec for method in pilot.allowed.methods}) == known
    own, aux = pilot._sample.own, pilot._sample.aux
    assert (own is not None) == known
    if own is not None:
        assert own.numel() == aux["parameter"].numel() == aux["second"].numel() == 1200
        assert not torch.equal(aux["parameter"], ddp.module.weight.detach().reshape(-1))  # a copy, of step 2


def test_a_sample_with_the_state_of_the_optimizer_takes_the_place_of_one_without() -> None:
    """As if a GradScaler has skipped the first steps."""
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.AdamW(ddp.parameters())
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    pilot._script = inspects(pilot)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(5, 40)).square().sum().backward()
        if step >= 2:
            optimizer.step()
        found.append(pilot._sample is not None and bool(pilot._sample.aux))
    assert found == [False, False, False, True, True]
    handle.detach()


@pytest.mark.parametrize(("given", "unchosen"), [
    ("none", "DDP's all-reduce"),  # but not its hook, which would round what was to stay
    ("onebit", "gradwire, dense where auto decides"),  # DDP's would not compress what was to be compressed
])  # fmt: skip
def test_what_a_mapping_names_is_part_of_each_plan(given: str, unchosen: str) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40)))
    handle = gw.attach(ddp, {"0.weight": given, "*": "auto"}, fidelity="near-lossless")
    pilot = handle.autopilot
    assert pilot is not None and pilot.current.name == unchosen
    names = list(pilot.allowed.tensors)
    assert "0.weight" not in names and len(names) == 3
    tensors = [PlannedTensor(name, spec.shape) for name, spec in pilot.allowed.tensors.items()]
    planned = plan(tensors, COSTS, [fidelity.RankedCompressor("fp16", ("ring",))], native=())
    assert planned.compresses and planned.native_kind == "" and not planned.native
    found = pilot._predict(planned, TIMING, COSTS)
    assert [candidate.name for candidate in found] == [unchosen, "gradwire, fp16"]
    (compressed,) = (candidate for candidate in found if candidate.table is not None)
    assert compressed.plan is not None and compressed.plan.entries is not None
    assert compressed.plan.entries.keys() == {"0.weight", *names}
    assert compressed.plan.entries["0.weight"].compressor.name == given
    assert fidelity_of(pilot.current) > fidelity_of(compressed)
    assert fidelity_of(Candidate("gradwire onebit", plan=gw.Plan("onebit"))) == fidelity_of(compressed)
    handle.detach()


@pytest.mark.parametrize(("momentum", "threelc"), [(0.0, True), (0.9, False), (None, False)])
def test_momentum_in_the_optimizer_leaves_out_what_suffers_from_it(momentum: float | None, threelc: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = None if momentum is None else torch.optim.SGD(ddp.parameters(), 0.1, momentum=momentum)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    assert handle.autopilot is not None
    assert ("threelc" in {method.spec for method in handle.autopilot.allowed.methods}) == threelc
    handle.detach()


def test_momentum_that_comes_later_takes_away_what_suffers_from_it() -> None:
    """As by OneCycleLR, or by a state that is loaded."""
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    assert handle.autopilot is not None
    allowed = handle.autopilot.allowed
    assert allowed.change(allowed.state(), NATIVE) is None
    optimizer.param_groups[0]["momentum"] = 0.9
    assert allowed.change(allowed.state(), NATIVE) is MOMENTUM
    allowed.update(allowed.state())
    assert "threelc" not in {method.spec for method in allowed.methods}
    assert allowed.change(allowed.state(), NATIVE) is None
    handle.detach()


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1e7, False), (1e-9, False)])
def test_gradients_that_do_not_fit_fp16_are_not_cast_to_it(factor: float, fits: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    handle = gw.attach(ddp, "auto")
    assert handle.autopilot is not None
    allowed = handle.autopilot.allowed
    handle.autopilot._script = inspects(handle.autopilot)
    for _ in range(2):
        ddp.zero_grad()
        (factor * ddp(torch.randn(5, 40)).square().mean()).backward()
    assert (allowed.change(allowed.state(), NATIVE_FP16) is MISFIT) == (not fits)
    assert allowed.change(allowed.state(), NATIVE) is None, "what casts nothing goes on"
    planned = Candidate.of(table("fp16"))
    assert (allowed.change(allowed.state(), planned) is MISFIT) == (not fits)
    allowed.update(allowed.state())
    assert ("fp16" in {method.spec for method in allowed.methods}) == fits
    predicted = handle.autopilot._predict(table("fp16"), TIMING, COSTS)
    assert (NATIVE_FP16 in predicted) == fits
    assert NATIVE_BF16 in predicted, "which has the range of float32"
    assert allowed.allows(NATIVE_BF16) and allowed.allows(NATIVE_FP16) == fits
    handle.detach()


@pytest.mark.parametrize(("given", "unchosen"), [
    ("none", "DDP's all-reduce"), ("onebit", "gradwire, dense where auto decides"),
])  # fmt: skip
def test_a_rule_holds_for_tensors_that_are_frozen_at_attach(given: str, unchosen: str) -> None:
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 40))
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(False)
    handle = gw.attach(ddp, {"0.*": given, "*": "auto"})
    assert handle.autopilot is not None
    allowed = handle.autopilot.allowed
    assert not allowed.given and allowed.unchosen == NATIVE and allowed.native_halves == [NATIVE_FP16, NATIVE_BF16]
    planned = Candidate.of(table("fp16"), later=allowed.undecided)
    assert planned.plan is not None
    assert planned.plan.entry("0.weight", TensorSpec((100, 200))).compressor.name == given
    handle.synchronizer.register({"0.weight": TensorSpec((100, 200))})
    assert allowed.change(allowed.state(), NATIVE) is MORE_TENSORS
    assert allowed.given.keys() == {"0.weight"} and "0.weight" not in allowed.tensors
    assert allowed.unchosen.name == unchosen and allowed.native_halves == []
    handle.detach()


def test_gcomp_by_name_needs_its_optimizer_also_where_auto_decides_about_the_rest() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40)))
    with pytest.raises(OptionError, match="optimizer"):
        gw.attach(ddp, {"0.weight": "gcomp", "*": "auto"})


def test_tensors_need_the_optimizer_only_while_gcomp_has_them() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40)))
    optimizer = torch.optim.AdamW(ddp.parameters())
    with gw.attach(ddp, "auto", optimizer=optimizer) as handle:  # which may choose gcomp later
        assert handle.synchronizer.need_optimizer == frozenset()
        handle.synchronizer.replan(gw.Plan({"0.weight": "gcomp", "*": "none"}))
        assert handle.synchronizer.need_optimizer == {"0.weight"}
