"""HiPress's table 7: the printed equations, and the record."""

import csv

import pytest
from benchmarks.papers.hipress import table7

from gradwire.bench.records import COLUMNS, write_figures


@pytest.fixture(scope="module")
def cells():
    return table7.cells()


def test_every_entry_is_there_by_all(cells):
    assert [cell.by for cell in cells] == list(table7.BY) * 12
    lines = table7.table(list(table7.figures(cells))).splitlines()
    assert len(lines) == 14
    assert "<yes, 12>" in next(line for line in lines if "392 MB scatter_reduce" in line)


def test_a_choice_is_never_slower_than_dense(cells):
    for cell in cells:
        assert cell.choice.seconds <= cell.choice.dense_seconds
        assert cell.choice.compress == (cell.choice.seconds < cell.choice.dense_seconds)


def test_the_largest_gradients_are_compressed_by_all(cells):
    for cell in cells:
        if cell.megabytes == 392:
            assert cell.choice.compress
            assert cell.choice.partitions >= cell.nodes


def test_the_planner_knows_fewer_partitions_than_nodes(cells):
    """Table 7 has 5 and 6 partitions for 16 nodes, and 1 and 2 for small gradients."""
    few = [cell for cell in cells if cell.by == table7.ONE_BATCH and cell.choice.partitions < cell.nodes]
    assert {(cell.topology, cell.nodes) for cell in few} >= {("ps_colocated", 16), ("ring", 16), ("ps_colocated", 4)}
    assert table7.agreeing([cell.choice for cell in cells if cell.by == table7.ONE_BATCH]) >= 6


def test_without_fixed_times_a_partition_per_node_is_best(cells):
    """So the published constants alone give no other entry: all that take time depend on bytes."""
    assert all(cell.choice[:2] == (True, cell.nodes) for cell in cells if cell.by == table7.UNFITTED)


def test_the_chosen_fixed_times_are_among_the_best_fits():
    found = table7.fits()
    best = found[0][:2]
    assert best in [fit[:2] for fit in found if (fit.kernel, fit.message) == (table7.KERNEL, table7.MESSAGE)]


def test_published_entries_stand_in_a_column_of_their_own(cells, tmp_path):
    path = tmp_path / "table7.csv"
    write_figures("hipress-table7", table7.figures(cells), path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*COLUMNS, "published"]
    assert len(rows) == 12 * len(table7.BY) * 4
    no = [row for row in rows if row["metric"] == "compress" and row["published"] == "0"]
    assert {(row["size"], row["ranks"]) for row in no} == {(str(4 << 20), "16")}
    assert {row["method"] for row in no} == {f"onebit, {by}, ring" for by in table7.BY}
