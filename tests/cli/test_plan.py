from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire.bench.users import UserCodeError
from gradwire.cli import plan as command
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.planner import PlanTable
from gradwire.planner.costs import Costs, LinkCosts
from gradwire.planner.fidelity import methods
from tests.planner.machines import codecs, costs

MEASURED = costs(world_size=8, rate=1e8)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return app


@pytest.fixture
def costs_file(tmp_path) -> str:
    """Made-up costs of everything that a level allows."""
    made = codecs()
    named = {method.spec: made["half" if "16" in method.spec else "bit"] for method in methods("aggressive")}
    named["lossless"] = made["lossless"]
    path = tmp_path / "costs.json"
    path.write_text(costs(world_size=8, rate=1e8, codecs=named | {"none": made["none"]}).to_json())
    return str(path)


def test_a_plan_is_printed_and_saved_pinned(app, costs_file, tmp_path) -> None:
    saved = tmp_path / "plan.json"
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--save", str(saved)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.output.startswith("Plan for 8 ranks, fidelity balanced\n")
    assert "\nencoder.weight " in result.output
    assert "\nCompress " in result.output
    table = PlanTable.load(saved)
    assert table.pinned
    assert table.world_size == 8
    assert set(table.plan().entries) == {row.name for row in table.rows}


def test_a_described_link_has_its_own_nodes(app, costs_file) -> None:
    """Whatever nodes costs were measured on."""
    path = Path(costs_file)
    measured = Costs.from_json(path.read_text())
    path.write_text(replace(measured, ranks_per_node=2, within=LinkCosts(1e-6, 1e-10)).to_json())
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--json", "--rate", "1gbit", "--ranks", "3"]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert PlanTable.from_json(found.output).world_size == 3


def test_a_described_link_replaces_the_measured_one(app, costs_file) -> None:
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--json"]
    slow, fast = (
        PlanTable.from_json(CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).output)
        for more in ([], ["--rate", "100gbit", "--ranks", "16"])
    )
    assert (slow.world_size, fast.world_size) == (8, 16)
    assert slow.compresses
    assert fast.step < slow.step


def test_tensors_are_handed_over_in_ddps_buckets(app, costs_file) -> None:
    """So small ones share messages and calls, as they will in the training."""
    arguments = ["plan", "--model", "resnet50", "--costs", costs_file, "--json"]
    tables = [
        PlanTable.from_json(CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).output)
        for more in ([], ["--bucket", "0.001"])
    ]
    num_buckets = [len({row.ready for row in table.rows}) for table in tables]
    assert num_buckets[0] < 8 and num_buckets[1] > 100


def test_ranks_of_a_node_share_its_link(app, costs_file) -> None:
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--rate", "1gbit", "--ranks", "8", "--json"]
    alone, shared = (
        PlanTable.from_json(CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).output)
        for more in ([], ["--ranks-per-node", "4"])
    )
    assert "hierarchical" in {row.strategy for row in shared.rows} - {row.strategy for row in alone.rows}
    wrong = CliRunner().invoke(app, [*arguments, "--ranks-per-node", "3"])
    assert isinstance(wrong.exception, OptionError) and "multiple" in str(wrong.exception)


def test_a_level_allows_no_more_than_it_says(app, costs_file) -> None:
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--json", "--fidelity"]
    exact, half, balanced = (
        PlanTable.from_json(CliRunner().invoke(app, [*arguments, level], catch_exceptions=False).output)
        for level in ("exact", "near-lossless", "balanced")
    )
    assert {row.spec for row in exact.rows} <= {"none", "lossless"} and exact.native_kind == "fp32"
    # Half of the bytes are DDP's own hook's, too, which a plan must beat.
    assert half.native and half.native_kind == "fp16" and half.step < 0.6 * exact.dense_step
    assert balanced.compresses and balanced.step < half.step


def test_the_network_is_the_described_one_else_the_measured_one() -> None:
    network = command._network
    assert network(MEASURED, None, None, "20us") == MEASURED
    assert network(MEASURED, 16, None, "20us").links == (MEASURED.slowest,)
    described = network(MEASURED, None, "1gbit", "50us")
    assert (described.world_size, described.links) == (8, (LinkCosts(50e-6, 8e-9),))
    without = costs(world_size=1, rate=float("inf"))
    assert network(without, None, None, "20us").links == (LinkCosts(20e-6, 8e-9),)
    assert network(without, None, None, "20us").world_size == 4


JOB = """
import torch

def job():
    torch.manual_seed(0)
    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256, dtype=torch.float32)
    model = torch.nn.Sequential(*layers)
    model.unused = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    return model, torch.ones(64, 256)
"""


def test_a_model_of_the_users_own_is_timed_and_planned(app, costs_file, tmp_path, monkeypatch) -> None:
    (tmp_path / "job_of_plan.py").write_text(JOB)
    bucket = ["--bucket", "0.1"]  # a bucket for each matrix
    arguments = ["plan", "--model", f"{tmp_path}/job_of_plan.py:job", "--costs", costs_file, "--json", *bucket]
    table = PlanTable.from_json(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert {row.name: row.numel for row in table.rows} == {
        "0.weight": 131072, "0.bias": 512, "2.weight": 131072, "2.bias": 256, "unused": 3,
    }  # fmt: skip
    ready = {row.name: row.ready for row in table.rows}
    assert 0 < ready["2.weight"] < ready["0.weight"] <= ready["unused"]  # backward comes to the last layer first
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    longer = [*arguments, "--compute", "10s"]
    longer[2] = "job_of_plan:job"
    table = PlanTable.from_json(CliRunner().invoke(app, longer, catch_exceptions=False).stdout)
    assert table.step == pytest.approx(10, rel=0.1)


def test_an_error_of_the_users_model_is_shown_as_theirs(app, costs_file, tmp_path) -> None:
    (tmp_path / "failing_of_plan.py").write_text(JOB.replace("64, 256)", "64, 255)"))
    with pytest.raises(UserCodeError, match=r"A step of .* failed(.|\n)*mat1 and mat2 shapes cannot be multiplied"):
        CliRunner().invoke(
            app,
            ["plan", "--model", f"{tmp_path}/failing_of_plan.py:job", "--costs", costs_file],
            catch_exceptions=False,
        )


def test_mistakes_get_advice(app, costs_file, tmp_path) -> None:
    with pytest.raises(OptionError, match="Leave --costs out"):
        CliRunner().invoke(app, ["plan", "--costs", str(tmp_path / "none.json")], catch_exceptions=False)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(OptionError, match="cannot be read"):
        CliRunner().invoke(app, ["plan", "--costs", str(tmp_path / "picture.png")], catch_exceptions=False)
    with pytest.raises(UnknownNameError, match="vgg19"):
        CliRunner().invoke(app, ["plan", "--model", "vgg", "--costs", costs_file], catch_exceptions=False)
    with pytest.raises(OptionError, match="--rate 1gbit"):
        CliRunner().invoke(app, ["plan", "--costs", costs_file, "--rate", "none"], catch_exceptions=False)
