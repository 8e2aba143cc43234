"""The solver against enumeration and numeric integrals, and what is kept on disk."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from gradwire.compressors.support import thc_tables
from gradwire.compressors.support.thc_tables import Table, cost, optimal, solve, stored, threshold
from gradwire.core.errors import OptionError
from gradwire.lang import cache


def stars_and_bars(bits: int, granularity: int) -> Iterator[tuple[int, ...]]:
    """All tables: 0, g, and 2^b - 2 of the integers between, in lexicographic order."""
    for inner in itertools.combinations(range(1, granularity), 2**bits - 2):
        yield (0, *inner, granularity)


def symmetric(bits: int, granularity: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, (granularity + 1) // 2), 2 ** (bits - 1) - 1):
        lower = (0, *inner)
        yield (*lower, *(granularity - value for value in reversed(lower)))


@pytest.mark.parametrize("p", [1 / 32, 1 / 1024, 0.3])
@pytest.mark.parametrize(
    ("bits", "granularities"), [(1, range(1, 9)), (2, range(3, 25)), (3, range(7, 17)), (4, range(15, 20))]
)
def test_the_shortest_path_is_the_best_of_all_tables(bits: int, granularities: range, p: float) -> None:
    for granularity in granularities:
        found = solve(bits, granularity, p)
        costs = {table: cost(table, granularity, p) for table in stars_and_bars(bits, granularity)}
        least = min(costs.values())
        assert found.cost == pytest.approx(least, abs=1e-13)
        assert costs[found.values] == found.cost
        # Of equals the first: never the later one of a table and its mirror image.
        assert found.values <= tuple(granularity - value for value in reversed(found.values))


def test_the_papers_choice_and_what_symmetry_would_cost() -> None:
    found = solve(4, 30, 1 / 32)
    assert found.cost == pytest.approx(0.0130625, abs=5e-8)
    by_hand = min(cost(table, 30, 1 / 32) for table in symmetric(4, 30))
    assert by_hand == pytest.approx(0.0130746, abs=5e-8)
    # Nor does an odd granularity make the best table symmetric.
    assert solve(2, 7, 1 / 32).cost < 0.85 * min(cost(table, 7, 1 / 32) for table in symmetric(2, 7))
    assert len(found.values) == 16 and (found.values[0], found.values[-1]) == (0, 30)


@pytest.mark.parametrize(("table", "p"), [((0, 1, 3, 4), 1 / 32), ((0, 7), 0.2), ((0, 1, 2, 9, 10, 30), 1 / 1024)])
def test_costs_are_the_integrals_of_appendix_b(table: tuple[int, ...], p: float) -> None:
    granularity, t = table[-1], threshold(p)
    values = [2 * t / granularity * value - t for value in table]
    total = 0.0
    for low, high in itertools.pairwise(values):
        # Simpson's rule over what stochastic quantisation of each a costs.
        a = np.linspace(low, high, 2001)
        up = (a - low) / (high - low)
        error = up * (high - a) ** 2 + (1 - up) * (a - low) ** 2
        density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        weights = np.tile([2.0, 4.0], 1000)
        weights[0] = 1
        total += float((np.append(weights, 1) * error * density).sum()) * (a[1] - a[0]) / 3
    assert cost(table, granularity, p) == pytest.approx(total, rel=1e-9)


def test_thresholds_leave_p_outside() -> None:
    assert threshold(1 / 32) == pytest.approx(2.153874694, abs=1e-9)
    for p in (0.5, 0.1, 1 / 1024, 1e-9):
        assert math.erfc(threshold(p) / math.sqrt(2)) == pytest.approx(p, rel=1e-9)


def test_more_integers_never_cost_more_where_they_contain_the_others() -> None:
    for bits in (1, 2, 3, 4):
        least = 2**bits - 1
        assert solve(bits, 2 * least, 1 / 32).cost <= solve(bits, least, 1 / 32).cost


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_CACHE_DIR", str(tmp_path))
    cache.folder.cache_clear()
    yield tmp_path / "tables"
    cache.folder.cache_clear()


def test_a_table_is_found_once_and_then_read(folder, monkeypatch) -> None:
    first = stored(3, 12, 1 / 16)
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    monkeypatch.setattr(thc_tables, "solve", lambda *_: pytest.fail("it was there"))
    assert stored(3, 12, 1 / 16) == first


@pytest.mark.parametrize("damage", ["{", "[]", '{"bits": 3}', None])
def test_a_damaged_file_is_made_again(folder, damage) -> None:
    first = stored(3, 12, 1 / 16)
    path = thc_tables.cached(3, 12, 1 / 16)
    if damage is None:  # whole, and of another table
        data = json.loads(path.read_text())
        data["values"][1] += 1
        damage = json.dumps(data)
    path.write_text(damage)
    assert stored(3, 12, 1 / 16) == first
    assert json.loads(path.read_text())["values"] == list(first.values)


def test_nothing_is_lost_where_nothing_can_be_written(folder, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert stored(2, 5, 1 / 16) == solve(2, 5, 1 / 16)


@pytest.mark.parametrize(
    ("options", "said"),
    [((4, 14, 0.1), r"granularity must be from 15 \(2\^bits - 1\)"), ((9, 600, 0.1), "bits must be from 1 to 8"),
     ((4, 30, 0.0), "1/32"), ((4, 2000, 0.1), "to 1023"), ((0, 5, 0.1), "bits must be from 1"),
     ((4, 30, 1.0), "p < 1")],
)  # fmt: skip
def test_impossible_tables_are_refused_with_advice(options, said) -> None:
    for function in (solve, optimal, stored):
        with pytest.raises(OptionError, match=said):
            function(*options)


def test_a_table_knows_its_threshold() -> None:
    assert Table(1, 1, 0.25, (0, 1), 0.0).threshold == threshold(0.25)
