"""`gradwire simulate`: tables, files and plots of described clusters, with costs from a file."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradwire.cli.app import build_app
from gradwire.cli.simulate import ModelOptions, SimulatedServerOptions
from gradwire.core.errors import GradwireError, OptionError, UnknownNameError
from gradwire.planner.costs import LinkCosts
from gradwire.simulate import Cluster, SimulatedLink, SimulatedServer
from gradwire.simulate.sweep import SweepMethod, sweep
from tests.simulate.costs import costs, onebit, summed


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(costs(10e-6, onebit=onebit(2e-10, 2e-10)).to_json())
    return str(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "served.json"
    path.write_text(costs(10e-6, thc=summed()).to_json())
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["simulate", *arguments])


def rows(*arguments: str) -> list[dict[str, object]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.stdout)["rows"]
    return found


def test_a_table_has_a_row_a_method_number_of_ranks_and_rate(known: str) -> None:
    result = run("--model", "ResNet50", "--costs", known, "--ranks", "2,4", "--rate", "1gbit,10gbit")
    assert result.exit_code == 0, result.output
    assert sum("onebit" in line for line in result.output.splitlines()) == 4
    assert "100 ms without communication" in result.output


def test_files_hold_what_the_table_shows(known: str, tmp_path: Path) -> None:
    table, picture, trace = tmp_path / "rows.csv", tmp_path / "plot.png", tmp_path / "trace.json"
    found = rows(
        *("--costs", known, "--ranks", "2,4", "--rate", "1gbit,10gbit", "--csv", str(table)),
        *("--plot", str(picture), "--trace", str(trace)),
    )
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [float(row["step_seconds"]) for row in read] == [row["step_seconds"] for row in found]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_straggler_and_nodes_change_the_step(known: str) -> None:
    base = ("--model", "vgg19", "--costs", known, "--ranks", "8", "--rate", "10gbit", "--compare", "")
    (even,), (late,), (nodes,) = (
        rows(*base),
        rows(*base, "--straggler", "3:slowdown=2,delay=10ms,rate=1gbit"),
        rows(*base, "--per-node", "4"),
    )
    assert late["step_seconds"] > even["step_seconds"] + 0.1  # type: ignore[operator]
    assert nodes["step_seconds"] != even["step_seconds"]


def test_buckets_let_small_tensors_travel_together(known: str) -> None:
    base = ("--costs", known, "--ranks", "4", "--rate", "1gbit", "--compare", "")
    (alone,), (together,) = rows(*base), rows(*base, "--bucket", "25")
    # Fewer frames and tasks for the same payloads, which wait for the bucket's last gradient.
    assert together["sent_bytes"] == pytest.approx(alone["sent_bytes"], rel=0.01)
    assert together["processor"] < 0.95 * alone["processor"]  # type: ignore[operator]


@pytest.mark.ci
def test_a_link_that_was_measured_is_the_default(tmp_path: Path) -> None:
    document = json.loads(costs(10e-6, onebit=onebit()).to_json())
    document["links"] = [{"latency": 1e-4, "seconds_per_byte": 8e-8, "per_message": 0.0}]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document))
    assert {row["rate_bits"] for row in rows("--costs", str(path), "--ranks", "2")} == {1e8}
    result = run("--costs", str(path), "--ranks", "2", "--latency", "1ms")
    assert isinstance(result.exception, OptionError)
    assert "Leave --latency out, or describe all links" in str(result.exception)
    assert {row["rate_bits"] for row in rows("--costs", str(path), "--latency", "1ms", "--rate", "1gbit")} == {1e9}


def test_a_measured_link_of_a_node_has_the_rate_of_all_its_ranks(tmp_path: Path) -> None:
    # Each of the 4 ranks had a fourth of 10 Gb/s between nodes.
    between, within = LinkCosts(1e-4, 8 / 2.5e9, 1e-6), LinkCosts(1e-5, 8 / 5e10)
    measured = replace(costs(10e-6, onebit=onebit()), world_size=8, links=(between,), ranks_per_node=4, within=within)
    path = tmp_path / "costs.json"
    path.write_text(measured.to_json())
    base = ("--model", "lstm", "--costs", str(path), "--ranks", "8", "--compare", "")
    described = Cluster(
        8, SimulatedLink(10e9, 1e-4, 1e-6, header_bytes=0), 4, SimulatedLink(5e10, 1e-5, header_bytes=0)
    )
    (expected,) = sweep(ModelOptions("lstm").simulated(), [SweepMethod("onebit")], [described], measured)
    for arguments in (base, (*base, "--per-node", "4")):
        (found,) = rows(*arguments)
        assert found["rate_bits"] == pytest.approx(10e9)
        assert found["step_seconds"] == pytest.approx(expected.step_seconds)
    for option, value in (("--per-node", "2"), ("--inner-rate", "1gbit"), ("--inner-latency", "1ms")):
        result = run(*base, option, value)
        assert isinstance(result.exception, OptionError)
        assert f"Leave {option} out, or describe all links" in str(result.exception)


SERVER = ("--method", "thc", "--compare", "none", "--strategy", "server", "--ranks", "4", "--rate", "100mbit")


def test_a_server_in_the_switch_is_faster_than_one_with_a_link_like_others(served: str) -> None:
    dense, linked = rows("--model", "resnet50", "--costs", served, *SERVER)
    _, switched = rows("--model", "resnet50", "--costs", served, *SERVER, "--server", "xdp", "--server-rate", "none")
    _, copied = rows("--model", "resnet50", "--costs", served, *SERVER, "--multicast")
    assert [dense["strategy"], linked["strategy"]] == ["", "server"]
    assert switched["step_seconds"] < copied["step_seconds"] < linked["step_seconds"]  # type: ignore[operator]
    table = run("--model", "resnet50", "--costs", served, *SERVER, "--server", "python")
    assert table.exit_code == 0 and "server" in table.output
    assert "…" not in table.output, "no column is cut off"


def test_a_server_with_multicast_has_the_costs_of_datagrams() -> None:
    def made(**options: object) -> SimulatedServer:
        found = SimulatedServerOptions(**options).simulated([SweepMethod("thc", "server")], None)  # type: ignore[arg-type]
        assert found is not None
        return found

    tcp, multicast, xdp = made(), made(multicast=True), made(server="xdp")
    assert multicast.rank_packet == xdp.rank_packet != tcp.rank_packet
    assert multicast.packet == multicast.statistics_packet == xdp.statistics_packet != tcp.packet


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--server", "xdp"), "Pass --method thc --strategy server"),
        ((*SERVER, "--server", "tofino"), "Known: python, xdp"),
        (("--strategy", "server", "--method", "onebit"), 'pass "thc" or "uthc"'),
        (("--strategy", "servers"), "Did you mean 'server'"),
        (("--ranks", "two"), "whole numbers"),
        (("--straggler", "3:speed=2"), "--straggler 3:slowdown=2"),
        (("--model", "vgg18"), "Did you mean 'vgg1"),
        (("--per-node", "3", "--ranks", "4"), "a multiple"),
    ],
)
def test_what_does_not_fit_is_refused_with_advice(known: str, arguments: tuple[str, ...], advice: str) -> None:
    result = run("--costs", known, *arguments)
    assert isinstance(result.exception, (OptionError, UnknownNameError, GradwireError))
    assert advice in str(result.exception)


def test_a_missing_file_of_costs_says_how_to_make_it(tmp_path: Path) -> None:
    result = run("--costs", str(tmp_path / "none.json"))
    assert "--measure" in str(result.exception)
