"""`auto` on real processes: ways change without losing a gradient, and decisions follow the links."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from typing import Any

import pytest

from gradwire.lab import Lab
from gradwire.tuning.auto import IN_VAIN, LOOKS, PASSES, REST_STEPS
from gradwire.tuning.calibration import SIZES
from tests.integration.launch import ROOT, launch, results


def test_nothing_is_lost_on_the_way_there_and_back() -> None:
    ranks = [outcome.result for outcome in launch("auto.there_and_back", 3, steps=6)]
    assert len({rank["hash"] for rank in ranks}) == 1
    ways = ranks[0]["ways"]
    assert ways[0] == ways[-1] == "DDP's all-reduce"
    assert "gradwire, onebit" in ways and "gradwire, flushing residuals" in ways
    for rank in ranks:
        assert rank["ways"] == ways  # all switch at the same steps
        assert rank["held"][1:] == [True, False]
        assert rank["error"] < 1e-5
        before, by_plan, after = rank["links"]
        assert (
            before == after == 0 < by_plan
        )  # nothing that a trial sends in addition to DDP is left for later comparisons
        _adds_up(rank["report"], rank["table"], num_native=ways.count("DDP's all-reduce"))


def test_what_16_bits_cannot_hold_delays_no_way_back() -> None:
    ranks = results(launch("auto.there_and_back", 3, steps=6, dtype="bfloat16"))
    assert len({rank["hash"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["ways"] == ranks[0]["ways"] and rank["ways"][-1] == "DDP's all-reduce"
        assert 0 < rank["ways"].count("gradwire, flushing residuals") <= 2 * (1 + IN_VAIN) < PASSES
        assert rank["error"] < 0.05  # parameters are bfloat16, too


def test_gradients_beyond_fp16_are_never_cast_to_it() -> None:
    ranks = results(launch("auto_allowed.too_large_for_fp16", 2))
    assert len({rank["hash"] for rank in ranks}) == 1
    for rank in ranks:
        assert "DDP's all-reduce" in rank["candidates"] and "DDP's all-reduce in fp16" not in rank["candidates"]
        assert "DDP's all-reduce in bf16" in rank["candidates"]
        assert "fp16" not in rank["specs"]
        assert all(math.isfinite(loss) for loss in rank["losses"])
        assert rank["losses"][-1] < rank["losses"][0]


def test_gradients_are_looked_at_right_before_fp16_is_tried() -> None:
    for rank in results(launch("auto_allowed.late_gradients", 2)):
        before, after = rank["allowed"]
        assert rank["reasons"][1] == "the optimizer has momentum now"
        assert "fp16" in before and "fp16" not in after
        assert not any("fp16" in name for name in rank["measured"][1]), rank["measured"]
        assert rank["sizes"] == [SIZES[2]] * 2  # as for the layer that was frozen at attach


@pytest.mark.parametrize(("infinite", "expected"), [(0, (1, True)), (2, (3, True)), (99, (LOOKS, False))])
def test_gradients_that_are_not_finite_say_nothing_about_fp16(infinite: int, expected: tuple[int, bool]) -> None:
    """Nor are those of other ranks enough."""
    assert results(launch("auto_allowed.looks_again", 2, infinite=infinite)) == [list(expected)] * 2


@pytest.mark.parametrize(("case", "given", "reason"), [
    ("momentum", "gradwire, threelc", "the optimizer has momentum now"),
    ("fp16", "DDP's all-reduce in fp16", "gradients no longer fit fp16"),
    ("unknown", "DDP's all-reduce in fp16", "the optimizer has momentum now"),
    ("rule", "DDP's all-reduce", "further parameters are trained"),
])  # fmt: skip
def test_what_is_no_longer_allowed_is_given_up(case: str, given: str, reason: str) -> None:
    """However fast it is."""
    ranks = results(launch("auto_allowed.no_longer_allowed", 2, case=case))
    assert len({rank["hash"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["ways"] == ranks[0]["ways"] and given in rank["ways"]
        assert rank["reason"] == reason
        assert given not in rank["measured"] and rank["chosen"] != given
        assert (rank["method"] == "onebit") == (case == "rule")


def test_with_momentum_correction_it_is_sgd_with_momentum_whatever_it_chooses() -> None:
    ranks = results(launch("auto.corrects_momentum", 3, steps=6))
    assert len({rank["hash"] for rank in ranks}) == 1
    dense = "gradwire, dense with velocities"
    for rank in ranks:
        assert rank["ways"][0] == rank["ways"][-1] == dense and "gradwire, threelc" in rank["ways"]
        assert rank["held"] == [False, True, False]
        assert rank["entries"] == {"weight": ["threelc", "allgather"], "bias": ["none", "scatter_reduce"]}
        assert rank["error"] < 1e-5
        assert rank["moved"] > 1


@pytest.mark.ci
def test_a_gradient_that_is_not_finite_is_no_sample_of_what_codecs_cost() -> None:
    for rank in results(launch("auto.overflows", 2)):
        assert rank["skipped"] == 1
        assert {"none", "int8", "thc"} <= rank["bytes"].keys()
        assert all(1 << 9 < nbytes <= 4 << 12 for nbytes in rank["bytes"].values()), rank["bytes"]


@pytest.mark.ci
def test_a_mapping_leaves_the_rest_to_auto() -> None:
    ranks = [outcome.result for outcome in launch("auto.decides_about_the_rest", 2, steps=40)]
    assert len({rank["hash"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["settled"] and rank["planned"] and all(names == ["parameters_.rest"] for names in rank["planned"])
        assert "onebit" in rank["method"]
        assert rank["errors"]["rest"] < 1e-5 < rank["errors"]["named"] < 0.5


def _adds_up(report: dict[str, Any], table: str, num_native: int) -> None:
    """Rows of a report, which were not part of every step, come to its total, as they print and as data."""
    total, native = report["total"], report["tensors"]["bucket 0"]
    assert native["method"] == "DDP's all-reduce" and native["syncs"] == num_native
    assert native["sent_bytes"] == num_native * (2 * 2 * 4 * 128 * 64 // 3)
    for column in ("sent_bytes", "dense_bytes", "encode_seconds", "decode_seconds", "elements", "syncs"):
        assert total[column] == pytest.approx(sum(row[column] for row in report["tensors"].values()))
    columns = [re.split(r" {2,}", line) for line in table.splitlines()[1:]]
    place = columns[0].index("kB/step")
    rows = [float(row[place]) for row in columns[1:-1]]
    assert float(columns[-1][place - 1]) == pytest.approx(sum(rows), abs=0.1 * len(rows)), table  # it has no method


def test_a_plan_may_come_before_parameters_that_were_frozen_at_attach() -> None:
    ranks = results(launch("auto.frozen_at_attach", 2))
    assert len({rank["hash"] for rank in ranks}) == 1
    assert ranks[0]["way"] == "gradwire, onebit"
    assert sorted(ranks[0]["tensors"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_at_rest_nothing_but_ddps_all_reduce_runs_and_every_step_counts() -> None:
    first, second = results(launch("auto.at_rest", 2))
    assert first["hash"] == second["hash"] and first["rested"] == second["rested"]
    for number, (step, syncs, sent_bytes) in enumerate(first["reported"], start=1):
        assert (step, syncs, sent_bytes) == (number, number, number * 4 * (16 * 16 + 16))
    # Replicas are compared every 20 steps. Such a step takes the place of one that rests.
    assert not any(first["rested"][step] for step in range(19, len(first["rested"]), 20))
    assert first["rested"].count(True) >= REST_STEPS[0] - 2  # a second rest waits until steps take as long as before


@pytest.mark.ci
def test_ranks_agree_on_costs() -> None:
    first, *others = [outcome.result for outcome in launch("auto.agrees_on_costs", 2)]
    assert others == [first]
    costs, largest, told = first
    assert set(json.loads(costs)["codecs"]) == {"none", "fp16"}
    assert largest == [float(number) for number in range(150)]
    assert told == "words"


def test_what_takes_long_and_what_is_decided_is_seen_without_a_configured_log() -> None:
    outcomes = launch("auto.small_tensors", 2)
    # A batch of small tensors takes a cast at most: nothing else is compiled and measured.
    assert results(outcomes) == [["none", "fp16", "bf16"]] * 2
    told = [line for line in outcomes[0].output.splitlines() if line.startswith("gradwire: auto: ")]
    first, decision = told[0], next(line for line in told if "gradwire: auto: Step " in line)
    assert first.startswith("gradwire: auto: a step by DDP's all-reduce takes ") and "are compiled" in first
    # On an unshaped loopback either may be the faster one.
    assert re.match("gradwire: auto: Step [0-9]+, at the start: (DDP's|gradwire, ).* A step measured: ", decision)
    assert "gradwire: " not in outcomes[1].output


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.timeout(220)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_when_the_link_becomes_slow_it_looks_again_and_compresses(momentum: float) -> None:
    """That way about, since steps that compress take about as long on both links."""
    lines: list[tuple[int, str]] = []
    moments: list[float] = []
    with Lab(3, "10gbit") as lab:

        def on_line(host: int, stream: str, line: str) -> None:
            lines.append((host, line))
            if line.startswith("decided"):
                moments.append(time.monotonic())
                if len(moments) == 1:
                    lab.set_rate("30mbit")

        command = [sys.executable, "-m", "tests.integration.jobs.auto", "60", "2", str(momentum)]
        lab.run(command, on_line=on_line, cwd=ROOT, timeout=200)
    decisions = [text for _, text in lines if text.startswith("decided")]
    assert len(decisions) == 2, lines
    assert "at the start: " in decisions[0]
    assert re.search(
        "(steps take|synchronizing takes|frames are under way for) .* after .*: gradwire, .*threelc", decisions[1]
    )
    assert moments[1] - moments[0] <= 45, lines  # 5 to be sure of a change, then measuring and trials; a busy machine
    hashes = {text for _, text in lines if text.startswith("hash")}
    assert len(hashes) == 1
