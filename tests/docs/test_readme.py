"""README.md: short enough, its links lead somewhere, its example runs, and its figures are those of the records."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.accuracy.summary import Findings
from benchmarks.catalog import RESULTS
from benchmarks.readme_picture import FAST, SLOW, bars

from gradwire.bench.records import read_figures
from tests.integration.launch import ROOT, free_port

README = (ROOT / "README.md").read_text()
MOST_WORDS = 900
STEPS = 12
_METHODS = {"DDP fp32": "ddp-fp32", "DDP fp16 hook": "ddp-fp16"}
# What the example leaves to its reader.
_PRELUDE = f"""
import torch
def MyModel():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
loss_fn = torch.nn.functional.cross_entropy
from sklearn.datasets import load_digits
images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
batches = [(images[at::100].float() / 16, labels[at::100]) for at in range({STEPS})]
"""


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_links_and_pictures_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(targets) > 10
    assert [each for each in targets if not (ROOT / each).exists()] == []


def test_its_two_commands_are_targets() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) == {"demo", "test"} <= set(targets)


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(_PRELUDE + "\n".join(line[1:] for line in diff.splitlines()))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"threelc.*scatter_reduce", done.stdout)


def test_minutes_to_the_loss_of_ddp_are_those_of_the_record() -> None:
    found = Findings.of(read_figures(RESULTS / "time-to-accuracy.csv"), "text")
    rows = re.findall(r"^\| (.+?)" + 6 * r" \| ([\d.]+)" + r" \|$", README, re.M)
    assert len(rows) > 4
    for name, *cells in rows:
        method = _METHODS.get(name, name.strip("`"))
        for rate, (minutes, *speedups) in ((SLOW, cells[:3]), (FAST, cells[3:])):
            reached = found.seconds_to_goal(method, rate).values()
            seconds = [each for each in reached if each is not None]
            assert len(seconds) == len(reached), f"{name}: a seed does not reach the loss"
            assert float(minutes) == pytest.approx(statistics.fmean(seconds) / 60, abs=0.06), (name, rate)
            for rival, speedup in zip(_METHODS.values(), speedups, strict=True):
                mean = statistics.fmean(found.speedups(method, rate, rival))
                assert float(speedup) == pytest.approx(mean, rel=0.01), (name, rate, rival)


def test_the_picture_and_its_description_are_those_of_the_record() -> None:
    (description,) = re.findall(r'<img alt="([^"]+)"', README)
    rows = list(bars())
    assert {"DDP fp32", "DDP fp16 hook"} < {row.name for row in rows}
    for row in rows:
        assert row.name in description, row.name
        if row.minutes is not None:
            assert f"{row.name} {row.minutes:.1f}" in description, row.name
    for theme in ("light", "dark"):
        picture = (ROOT / f"docs/images/results-{theme}.svg").read_text()
        drawn = re.findall(r"<!-- (.+?) -->", picture)
        for row in rows:
            figures = [f"{row.slow:.0f}", f"{row.fast:.0f}", *([f"{row.minutes:.1f}"] if row.minutes else [])]
            assert row.name in drawn, row.name
            assert [each for each in figures if each not in drawn] == [], "run python -m benchmarks.readme_picture"
