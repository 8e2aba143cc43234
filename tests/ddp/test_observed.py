"""What a handle shows, where one process is the whole job. Several ranks: tests/integration/test_observed.py."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.ddp.observed import AUTO_SCALARS, SCALARS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def module() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 2))


def step(ddp: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        ddp(torch.ones(5, 4)).sum().backward()


def test_reports_of_intervals_add_up() -> None:
    ddp = module()
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
    step(ddp, 3)
    assert handle.report(since="last").steps == 3
    step(ddp, 2)
    assert handle.report().steps == 5
    interval = handle.report(since="last")
    assert interval.steps == 2
    assert 0 < interval.seconds < handle.report().seconds
    assert handle.report(since="last").steps == 0
    assert str(interval).startswith("gradwire on rank 0 of 1, 2 steps")
    with pytest.raises(OptionError, match='since must be "start" or "last", but it is \'yesterday\''):
        handle.report(since="yesterday")  # type: ignore[arg-type]
    handle.detach()


def test_names_of_scalars_are_those_of_the_documentation_and_do_not_change() -> None:
    ddp = module()
    handle = gw.attach(ddp, "threelc")
    assert list(handle.scalars()) == list(SCALARS)
    step(ddp)
    found = handle.scalars()
    assert list(found) == list(SCALARS) and all(type(value) is float for value in found.values())
    assert found["gradwire/step"] == 1
    handle.detach()
    handle = gw.attach(ddp, "auto")
    found = handle.scalars()
    assert list(found) == [*SCALARS, *AUTO_SCALARS]
    assert found["gradwire/auto/decisions"] == 0 and math.isnan(found["gradwire/auto/step_ms"])
    handle.detach()
    documented = re.findall(r"^\| `(gradwire/[\w/]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(documented) == SCALARS | AUTO_SCALARS


def test_a_log_writes_intervals_and_its_last_one_at_detach(tmp_path: Path) -> None:
    ddp = module()
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
    step(ddp, 2)
    seen: list[int] = []
    handle.log_to(tmp_path / "log.csv", every=4)
    closed = handle.log_to(lambda scalars, step: seen.append(step), every=1)
    step(ddp, 3)
    closed.close()
    step(ddp, 7)
    handle.detach()
    handle.detach()
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["gradwire/step"]) for row in rows] == [6, 10, 12]
    assert seen == [3, 4]  # a step ends where the next one begins
    with pytest.raises(OptionError, match="every must be at least 1"):
        handle.log_to(print, every=0)


@pytest.mark.parametrize(("name", "written"), [("log.csv", "log.rank0.csv"), ("log", "log.rank0")])
def test_each_rank_has_a_file_if_all_write(name: str, written: str, tmp_path: Path) -> None:
    ddp = module()
    with gw.attach(ddp, "threelc") as handle:
        handle.log_to(tmp_path / name, every=1, all_ranks=True)
        step(ddp, 2)
    assert [path.name for path in tmp_path.iterdir()] == [written]


def test_a_block_detaches_at_its_end_and_by_an_exception() -> None:
    ddp = module()
    with gw.attach(ddp, "threelc") as handle:
        step(ddp)
    assert "detached" in repr(handle) and handle.report().steps == 1
    with pytest.raises(KeyError, match="'mine'"), gw.attach(ddp, "threelc") as handle:
        raise KeyError("mine")
    assert "detached" in repr(handle)
    step(ddp)
    assert handle.report().steps == 0
