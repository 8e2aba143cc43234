"""Figures of the sweeps: reading back, and the cost of keeping more."""

import pytest
from benchmarks.papers.hipress import sweeps

from gradwire.bench import methods
from gradwire.bench.records import read_figures, write_figures


@pytest.fixture
def figures(tmp_path):
    speedups = {"minmax:bits=2": 4.0, "minmax:bits=4": 3.0, "minmax:bits=8": 2.0}
    path = tmp_path / "sweeps.csv"
    rows = [
        {"method": method, "rate": "1gbit", "metric": metric, "value": value}
        for method, speedup in speedups.items()
        for metric, value in (("speedup", speedup), ("step", 1 / speedup), ("step_without_communication", 0.1))
    ]
    write_figures("replay", rows, path)
    return read_figures(path)


def test_all_methods_exist():
    methods.check(list(sweeps.METHODS))


def test_losses_are_those_of_the_narrowest(figures):
    steps = sweeps.by_method(figures)
    assert sweeps.kept(steps, sweeps.WIDTHS, "1gbit") == [("2", 4.0, 0.0), ("4", 3.0, 0.25), ("8", 2.0, 0.5)]
    assert sweeps.table(figures) == "1gbit    minmax:bits 2: 4.00x, 4: 3.00x (-25.0%), 8: 2.00x (-50.0%)"


def test_the_plot_names_the_methods_that_there_are(figures, tmp_path):
    pytest.importorskip("matplotlib")
    sweeps.plot(figures, tmp_path)
    drawn = (tmp_path / "sweeps.svg").read_text()
    assert "gradwire minmax bits 8" in drawn
    assert "topk" not in drawn
