"""Cells of `benchmarks.papers.thc.lab_servers`, and its table."""

from __future__ import annotations

from itertools import product

from benchmarks.papers.thc import lab_servers
from benchmarks.papers.thc.lab import RATES
from benchmarks.papers.thc.lab_ends import SERVERS

from gradwire.bench import methods


def test_each_kind_of_server_has_both_links_and_a_method_that_exists() -> None:
    served = [case for case in lab_servers.CASES.values() if "@server" in case.method]
    assert {(case.server, case.link) for case in served} == set(product(SERVERS, (1.0, 4)))
    methods.check(list(dict.fromkeys(case.method for case in lab_servers.CASES.values())))


def test_a_cell_that_is_done_is_not_measured_again() -> None:
    done = set(product(lab_servers.PARTS, lab_servers.CASES, RATES))
    assert list(lab_servers.run(done=done)) == []


def test_the_table_compares_steps_with_ddp_and_has_dashes_for_what_is_not_there() -> None:
    here = {"rate": "1gbit", "metric": "step"}
    rows = [{**here, "case": "xdp wide", "value": 0.2}, {**here, "case": "DDP fp32", "value": 0.5}]
    lines = lab_servers.table(rows).splitlines()
    assert lines[2].startswith("| DDP fp32 | 500 | 1.00 | – |")
    assert lines[3] == "| xdp wide | 200 | 2.50 | – | – | – | – | – | – |"
