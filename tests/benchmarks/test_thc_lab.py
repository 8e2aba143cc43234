"""Figures that `benchmarks.papers.thc.lab` computes from messages of ranks and the aggregator."""

from __future__ import annotations

import json

import pytest
from benchmarks.keys import merged
from benchmarks.papers.thc import lab as thc_lab

from gradwire.bench.launch import ServerProcess

SAID = [
    {"rank": 0, "seconds": [0.5, 0.4, 0.6], "rounds": 6, "worker": 0.3, "server": 0.03, "sent": 3000, "received": 6000},
    {"rank": 1, "seconds": [0.4, 0.5, 0.7], "rounds": 6, "worker": 0.6, "server": 0.06, "sent": 3600, "received": 6600},
]


def figures(server_seconds: float | None) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in thc_lab.round_figures(SAID, server_seconds, 100)}


def test_a_round_is_that_of_the_slowest_rank_and_the_wire_is_what_codecs_leave() -> None:
    found = figures(None)
    assert found["round"] == 0.5
    assert found["round_worker"] == pytest.approx(0.15) and found["round_server"] == pytest.approx(0.015)
    assert found["round_wire"] == pytest.approx(0.5 - 0.165)
    assert found["bytes_there"] == 1100 and found["bytes_back_an_element"] == 21


def test_an_aggregators_seconds_are_over_all_rounds_that_it_served() -> None:
    assert figures(0.6)["round_server"] == pytest.approx(0.1)


def rows(part: str, method: str, metric: str, rate: str, *values: float) -> list[dict[str, object]]:
    return [
        {
            "part": part,
            "method": method,
            "metric": metric,
            "rate": rate,
            "value": value,
            "step": 10 * (at + 1),
            "seed": 0,
        }
        for at, value in enumerate(values)
    ]


def test_time_to_accuracy_is_steps_to_the_goal_times_a_step() -> None:
    ddp, thc = "ddp-fp32", "thc@server"
    known = [
        *rows("learn", ddp, "validation_accuracy", "none", 0.5, 0.8, 1.0),
        *rows("learn", thc, "validation_accuracy", "none", 0.5, 0.98, 0.96),
        *rows("learn", "terngrad", "validation_accuracy", "none", 0.1, 0.2, 0.3),
        *rows("steps", ddp, "step", "1gbit", 0.4), *rows("steps", thc, "step", "1gbit", 0.2),
    ]  # fmt: skip
    assert [thc_lab.steps_to_goal(known, method) for method in (ddp, thc, "terngrad")] == [[30], [20], [None]]
    lines = thc_lab.table_of(known, "1gbit").splitlines()
    assert lines[2].endswith("| 400 | 30 | 12.0 |") and lines[3].endswith("| 200 | 20 | 4.0 |")
    assert lines[4].endswith("| – | 0 of 1 get there | – |")


def test_the_goal_is_that_of_ddp_with_the_same_seed_after_the_goals_step() -> None:
    steps = thc_lab.GOAL_STEP // 10
    ddp = rows("learn", "ddp-fp32", "validation_accuracy", "none", *[0.1] * (steps - 1), 1.0, 2.0)
    other = [{**row, "seed": 1, "value": 10 * float(str(row["value"]))} for row in ddp]
    thc = rows("learn", "thc@server", "validation_accuracy", "none", 0.5, 0.97)
    known = [*ddp, *other, *thc, *({**row, "seed": 1} for row in thc)]
    assert thc_lab.steps_to_goal(known, "thc@server") == [20, None]
    assert thc_lab.table_of_learning(known).splitlines()[3].startswith("| gradwire thc, server | 20, – | 97.0 |")


def test_a_goal_between_two_validations_is_that_of_the_one_before() -> None:
    ddp = rows("learn", "ddp-fp32", "validation_accuracy", "none", 0.5, 1.0, 3.0)
    known = [{**row, "step": 50 * (at + 1)} for at, row in enumerate(ddp)]
    assert thc_lab.steps_to_goal(known, "ddp-fp32") == [100]


def test_what_is_measured_again_takes_the_place_of_the_earlier() -> None:
    old = [*rows("rounds", "thc@server", "round", "1gbit", 1.0), *rows("steps", "thc@server", "step", "1gbit", 2.0)]
    new = rows("rounds", "thc@server", "round", "1gbit", 3.0) + rows("rounds", "ddp-fp32", "round", "1gbit", 4.0)
    assert [row["value"] for row in merged(old, new, thc_lab.KEY)] == [3.0, 2.0, 4.0]


def test_one_aggregator_serves_one_method_after_another_at_the_address_of_its_host(tmp_path) -> None:
    asked = thc_lab.Asked(["1gbit"], list(thc_lab.METHODS), "text", 1.0, 0, 0, 60.0, server="xdp", link=4)
    server = thc_lab.server_process(str(tmp_path), asked, thc_lab.served(asked.methods)).at("10.0.0.5")
    assert server.command[4] == "serve"
    assert json.loads(server.command[5])[:3] == ["xdp", 1, "10.0.0.5"]
    assert server.link == 4
    assert server.variables["GRADWIRE_AGGREGATOR"] == f"10.0.0.5:{thc_lab.PORT}"
    assert ServerProcess(["run"]).at("there") == ServerProcess(["run"])
