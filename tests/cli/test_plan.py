from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from gradwire.cli import plan as command
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.sync.costs import LinkCosts
from gradwire.sync.fidelity import methods
from gradwire.sync.planner import PlanTable
from tests.sync.planner.machines import codecs, costs

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


def test_a_described_link_replaces_the_measured_one(app, costs_file) -> None:
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--json"]
    slow, fast = (
        PlanTable.from_json(CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).output)
        for more in ([], ["--rate", "100gbit", "--ranks", "16"])
    )
    assert (slow.world_size, fast.world_size) == (8, 16)
    assert slow.compresses
    assert fast.step < slow.step


def test_a_level_allows_no_more_than_it_says(app, costs_file) -> None:
    arguments = ["plan", "--model", "lstm", "--costs", costs_file, "--json", "--fidelity"]
    result = CliRunner().invoke(app, [*arguments, "near-lossless"], catch_exceptions=False)
    assert {row["spec"] for row in json.loads(result.output)["rows"]} == {"none", "fp16"}


def test_the_network_is_the_described_one_else_the_measured_one() -> None:
    network = command._network
    assert network(MEASURED, None, None, "20us") == MEASURED
    assert network(MEASURED, 16, None, "20us").links == (MEASURED.slowest,)
    described = network(MEASURED, None, "1gbit", "50us")
    assert (described.world_size, described.links) == (8, (LinkCosts(50e-6, 8e-9),))
    without = costs(world_size=1, rate=float("inf"))
    assert network(without, None, None, "20us").links == (LinkCosts(20e-6, 8e-9),)
    assert network(without, None, None, "20us").world_size == 4


def test_mistakes_get_advice(app, costs_file, tmp_path) -> None:
    with pytest.raises(OptionError, match="Leave --costs out"):
        CliRunner().invoke(app, ["plan", "--costs", str(tmp_path / "none.json")], catch_exceptions=False)
    with pytest.raises(UnknownNameError, match="vgg19"):
        CliRunner().invoke(app, ["plan", "--model", "vgg", "--costs", costs_file], catch_exceptions=False)
    with pytest.raises(OptionError, match="--rate 1gbit"):
        CliRunner().invoke(app, ["plan", "--costs", costs_file, "--rate", "none"], catch_exceptions=False)
