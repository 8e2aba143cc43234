"""The runner: options, records by part, and trials."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer
from benchmarks.__main__ import app
from benchmarks.catalog import BENCHMARKS, README, RESULTS, Benchmark, in_readme
from benchmarks.keys import merged
from typer.testing import CliRunner

from benchmarks import runner
from gradwire.bench.records import WHERE, read_figures

Data = Annotated[Path, typer.Option()]
MEASURED: list[str] = []


def run(data: Data, methods: str = "a,b", steps: int = 3, *, done: Set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    for method in methods.split(","):
        if (method,) not in done:
            MEASURED.append(method)
            yield {"method": method, "metric": "steps", "value": steps, "unit": "steps", "mine": 0.5}


def table(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['method']} {row['value']}" for row in rows)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir()
    (folder / "plot.svg").write_text(table(rows))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A benchmark whose record is in a temporary folder; returns its command line and the record."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("made_up")
    module.__dict__.update(run=run, table=table, plot=plot, KEY=("method",), CHOICES=("methods",))
    monkeypatch.setattr(runner, "module_of", lambda benchmark: module)
    MEASURED.clear()
    benchmark = Benchmark("made-up", "What is made up?", "made_up", presets={"methods": "a,b,c"})

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(runner.command(benchmark), ["--data", ".", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return call, tmp_path / benchmark.record


def test_a_part_is_measured_once_and_the_others_are_added(command):
    call, record = command
    assert "a 3\n" in call("--methods", "a")
    assert "a 3, b 3, c 3" in call()
    assert MEASURED == ["a", "b", "c"]
    assert "a 3, b 3, c 3" in call("--methods", "b", "--again")
    assert MEASURED == ["a", "b", "c", "b"]
    assert all(row["mine"] == 0.5 and row["commit"] and row["date"] for row in read_figures(record))


def test_earlier_rows_without_a_commit_get_none(command):
    call, record = command
    record.parent.mkdir(parents=True)
    record.write_text("method,value\na,1\nb,2\n")
    assert "a 3, b 2" in call("--methods", "a", "--again")
    new, old = read_figures(record)
    assert new["commit"] and new["device"]
    assert {old[name] for name in WHERE} == {None}


def test_another_setting_is_a_trial_and_no_record(command):
    call, record = command
    assert "a 5, b 5, c 5" in call("--steps", "5")
    assert not record.exists()
    call("--steps", "5", "--csv", "trial.csv", "--out", "plots")
    assert [row["value"] for row in read_figures(Path("trial.csv"))] == [5, 5, 5]
    assert Path("plots/plot.svg").read_text() == "a 5, b 5, c 5"


def test_figures_measured_before_a_failure_are_kept(command, monkeypatch):
    call, record = command
    module = runner.module_of(Benchmark("", ""))

    def failing(data: Data, *, done: Set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
        yield from run(data, "a", done=done)
        yield from run(data, "b", done=done)
        raise RuntimeError("no more")

    monkeypatch.setattr(module, "run", failing)
    with pytest.raises(RuntimeError):
        call()
    assert [row["method"] for row in read_figures(record)] == ["a"]  # b could have had more rows


def test_a_list_of_rows_is_written_at_once(command, monkeypatch):
    call, record = command
    seen = []

    def whole(
        data: Data, *, done: Set[tuple[str, ...]], recorded: list[dict[str, Any]]
    ) -> Iterator[list[dict[str, Any]]]:
        seen.append((done, [row["method"] for row in recorded]))
        for method in "ab":
            yield list(run(data, method, done=set()))
            seen.append([row["method"] for row in read_figures(record)])

    monkeypatch.setattr(runner.module_of(Benchmark("", "")), "run", whole)
    call()
    assert seen == [(set(), []), ["a"], ["a", "b"]]
    call("--again")
    assert seen[3] == (set(), ["a", "b"])


def test_merging_keeps_the_order_and_whole_parts():
    old = [{"k": "a", "v": 1}, {"k": "b", "v": 2}, {"k": "b", "v": 3}]
    new = [{"k": "b", "v": 4}, {"k": "c", "v": 5}]
    assert [row["v"] for row in merged(old, new, ("k",))] == [1, 4, 5]


# -- the catalog -------------------------------------------------------------------------------------------------------


def test_the_index_of_the_readme_is_that_of_the_catalog():
    text = README.read_text()
    assert in_readme(text) == text, "Run `python -m benchmarks list --write`."


def test_every_record_has_a_benchmark_and_every_benchmark_its_record():
    records = {each.record for each in BENCHMARKS.values() if each.record}
    assert records == set(RESULTS.glob("*.csv"))


def test_every_module_that_measures_is_in_the_catalog():
    modules = {each.module for each in BENCHMARKS.values() if each.module}
    folders = (Path("benchmarks") / name for name in ("accuracy", "micro", "planning", "papers"))
    measuring = {
        ".".join(path.with_suffix("").parts[1:])
        for folder in folders
        for path in folder.rglob("*.py")
        if "\nrun, table" in path.read_text() or all(f"\ndef {name}(" in path.read_text() for name in ("run", "table"))
    }
    assert modules == measuring


@pytest.mark.parametrize("benchmark", [each for each in BENCHMARKS.values() if each.module], ids=lambda each: each.name)
def test_every_benchmark_shows_its_options_and_its_record(benchmark):
    result = CliRunner().invoke(app, ["run", benchmark.name, "--help"])
    assert result.exit_code == 0
    assert "--csv" in result.output
    if benchmark.recorded:
        module = runner.module_of(benchmark)
        rows = read_figures(benchmark.record)
        assert module.table(rows)
        for name in getattr(module, "KEY", ()):
            assert name in rows[0]


def test_an_unknown_name_lists_the_known_ones():
    result = CliRunner().invoke(app, ["run", "nothing"])
    assert result.exit_code == 2
    assert "thc-scale" in result.output


def test_other_options_of_a_gradwire_command_do_not_replace_its_record():
    result = CliRunner().invoke(app, ["run", "replay-text", "--seconds", "1"])
    assert result.exit_code == 2
    assert "--csv FILE" in " ".join(result.output.replace("│", "").split())


def test_a_command_of_gradwire_has_no_table_to_show():
    result = CliRunner().invoke(app, ["show", "kernels"])
    assert result.exit_code == 2
    assert "print their tables" in " ".join(result.output.replace("│", "").split())


def test_a_command_of_gradwire_has_the_record_of_its_name():
    for each in BENCHMARKS.values():
        assert bool(each.module) != bool(each.stands_for)
        if each.stands_for and "--csv" not in each.arguments:
            assert each.stands_for.endswith(f"--csv {each.record}")
