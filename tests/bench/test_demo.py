"""What the demo runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.bench import demo
from gradwire.bench.training import run, segments_of
from gradwire.cli.app import build_app


def test_the_short_demo_has_the_main_result_and_fair_curves() -> None:
    segments = [segment for segment in segments_of(demo.SHORT) if segment.method != "no-communication"]
    assert [segment.method for segment in segments] == ["ddp-fp32", "ddp-fp16", "threelc", "auto"]
    # What auto chooses depends on the rate, so it trains at that rate.
    assert [segment.train_rate for segment in segments] == [None, None, None, "100mbit"]
    assert {segment.train_steps for segment in segments} == {150}


def test_the_full_demo_has_all_methods_and_tries_bucket_sizes() -> None:
    segments = segments_of(demo.FULL)
    assert {"ddp-fp32", "none", "int8", "onebit", "topk"} < {segment.method for segment in segments}
    assert len([segment for segment in segments if segment.method == "ddp-fp32"]) == 2


@pytest.mark.ci
def test_auto_trains_and_is_timed_with_one_decision() -> None:
    options = replace(demo.SHORT, workload="digits", ranks=2, steps=40, timed_seconds=0.1, lab=False)
    result = run(options)
    assert [entry.identical for entry in result.results] == [True] * 4
    auto = result.results[-1]
    assert len(auto.losses) == 40
    assert auto.times[0].settled


@pytest.mark.ci
def test_the_demo_prints_its_table_and_what_its_curves_cannot_show(tmp_path: Path) -> None:
    line = ["demo", "--hosts", "2", "--steps", "4", "--workload", "digits", "--loopback", "--out", str(tmp_path)]
    answer = CliRunner().invoke(build_app(), [*line, "--csv", str(tmp_path / "figures.csv")])
    assert answer.exit_code == 0, answer.output
    assert "4 steps are the beginning of a training" in answer.stdout
    assert [entry["method"] for entry in json.loads((tmp_path / "results.json").read_text())["results"]] == list(
        demo.SHORT.methods
    )
    assert (tmp_path / "figures.csv").read_text() == (tmp_path / "results.csv").read_text()
    assert "auto at 100 Mb/s" in (tmp_path / "index.html").read_text()
