"""The status of an attached module, where one process is the whole job. Several: tests/integration/test_top.py."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.ddp import status
from gradwire.observe import status_files
from gradwire.observe.status import RankStatus

OFTEN = timedelta(microseconds=1)


def module() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 2))


def step(ddp: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        ddp(torch.ones(5, 4)).sum().backward()


def only(folder: Path) -> RankStatus:
    (found,) = status_files.read_folder(folder).files
    return found.status


def test_a_handle_writes_what_it_does_until_it_is_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "COST_SHARE", 1e9)  # in every step
    ddp = module()
    with gw.attach(ddp, "threelc", options=gw.SyncOptions(dump_dir=tmp_path, status_interval=OFTEN)) as handle:
        step(ddp, 5)
    found = only(tmp_path)
    assert (found.rank, found.world_size, found.method, found.end) == (0, 1, "threelc", "detached")
    assert found.process.number == os.getpid() and found.num_steps == found.step == 5
    assert found.latest.steps == 1 and 0 < found.latest.seconds < found.seconds
    assert len(found.history) == 5, "a step ends when the next one begins, the last one when the module is detached"
    assert found.residual_norm == 0.0 and found.residual_step == 4
    assert found.links == () and found.auto is None and found.waiting is None and found.error == ""
    assert handle.report().steps == 5


def test_an_exception_that_ends_the_block_is_shown(tmp_path: Path) -> None:
    ddp = module()
    with pytest.raises(KeyError), gw.attach(ddp, "threelc", options=gw.SyncOptions(dump_dir=tmp_path)):
        raise KeyError("mine")
    found = only(tmp_path)
    assert (found.end, found.error) == ("detached", "KeyError: 'mine'")


def test_a_job_of_one_rank_under_auto_has_nothing_to_decide(tmp_path: Path) -> None:
    ddp = module()
    options = gw.SyncOptions(dump_dir=tmp_path, status_interval=OFTEN)
    with gw.attach(ddp, "auto", fidelity="exact", options=options):
        step(ddp, 3)
    found = only(tmp_path)
    assert found.method == "auto" and found.auto is not None
    assert (found.auto.fidelity, found.auto.current, found.auto.decisions) == ("exact", "DDP's all-reduce", ())


def test_every_attach_is_a_job_of_its_own(tmp_path: Path) -> None:
    ddp = module()
    for _ in range(2):
        gw.attach(ddp, "threelc", options=gw.SyncOptions(dump_dir=tmp_path)).detach()
    files = status_files.read_folder(tmp_path).files
    assert len({each.status.job for each in files}) == 2
    assert all(each.status.step_age is None for each in files)


def test_an_interval_of_zero_means_no_file(tmp_path: Path) -> None:
    ddp = module()
    options = gw.SyncOptions(dump_dir=tmp_path, status_interval=timedelta(0))
    with gw.attach(ddp, "threelc", options=options) as handle:
        step(ddp)
        assert handle.status_writer is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match=r"status_interval must be at least 0, .* timedelta\(0\) for no status files"):
        gw.SyncOptions(status_interval=timedelta(seconds=-1))


def test_training_goes_on_where_the_default_folder_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GRADWIRE_DUMP_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"gradwire-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"gradwire-{os.getuid()}").chmod(0o777)
    ddp = module()
    with caplog.at_level(logging.WARNING, "gradwire"), gw.attach(ddp, "threelc") as handle:
        step(ddp)
        assert handle.status_writer is None
    assert "gradwire top cannot show this rank" in caplog.text and "is not a private folder" in caplog.text


def test_a_module_that_is_dropped_ends_its_file(tmp_path: Path) -> None:
    ddp = module()
    interval = timedelta(milliseconds=5)
    handle = gw.attach(ddp, "threelc", options=gw.SyncOptions(dump_dir=tmp_path, status_interval=interval))
    writer = handle.status_writer
    assert writer is not None
    del ddp, handle
    gc.collect()
    writer._thread.join(60)
    assert not writer._thread.is_alive()
    assert only(tmp_path).end == "detached"


def test_what_takes_long_is_done_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that each look at the residuals moves by a second, and each step by as much."""
    clock, looks = [1000.0], []
    monkeypatch.setattr("gradwire.ddp.status.time.monotonic", lambda: clock[0])
    ddp = module()
    with gw.attach(ddp, "threelc", options=gw.SyncOptions(status_interval=timedelta(0))) as handle:
        found = status.ModuleStatus(handle.synchronizer, "threelc", timedelta(seconds=2))
        report = handle.synchronizer.report

        def slow_report(*, with_norms: bool = True) -> object:
            if with_norms:
                looks.append(clock[0])
                clock[0] += 1.0
            return report(with_norms=with_norms)

        monkeypatch.setattr(handle.synchronizer, "report", slow_report)
        for _ in range(2100):
            clock[0] += 1.0
            found.step(None)
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert len(looks) == 3 and min(gaps) >= 1.0 / status.COST_SHARE
