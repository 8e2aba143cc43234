"""`gradwire top`: what it shows of files, and what it says where there is nothing to show."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from gradwire.cli.app import build_app
from gradwire.cli.top_page import page, sparkline
from gradwire.observe import status_files
from gradwire.observe.jobs import jobs_of
from gradwire.observe.processes import ProcessIdentity
from gradwire.observe.status import LinkStatus, RankStatus
from gradwire.observe.status_files import StatusFile, StatusFolder
from tests.observe.statuses import blocked, status

WIDE = {"COLUMNS": "120"}


def top(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["top", *arguments], env=WIDE)


def write(folder: Path, *found: RankStatus) -> None:
    for each in found:
        status_files.write(status_files.path_of(folder, each.job, each.rank), each)


def shown(*found: RankStatus, width: int = 120) -> str:
    jobs = jobs_of(StatusFile(each, 1.0) for each in found)
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(page(jobs[0], jobs[1:], StatusFolder(Path("x"), (), {}), width))
    return console.export_text()


def test_without_a_job_it_says_what_to_do(tmp_path: Path) -> None:
    result = top("--folder", str(tmp_path))
    assert result.exit_code == 1
    assert f"No job has written its status to {tmp_path}. Start one that calls gradwire.attach" in result.output
    assert "pass that folder as --folder" in result.output and "status_interval=timedelta(0)" in result.output
    result = top("--folder", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "none cannot be read: No such file or directory. Pass another --folder." in result.output


def test_the_default_folder_is_that_of_the_flight_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_DUMP_DIR", str(tmp_path))
    assert str(tmp_path) in top().output
    monkeypatch.delenv("GRADWIRE_DUMP_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert f"{tmp_path}/gradwire-{os.getuid()}" in top().output
    (tmp_path / f"gradwire-{os.getuid()}").chmod(0o777)
    result = top()
    assert result.exit_code == 1
    assert "is not a private folder" in result.output and "set GRADWIRE_DUMP_DIR to a folder of yours" in result.output


def test_a_frame_has_ranks_links_bytes_split_decisions_and_residuals(tmp_path: Path) -> None:
    write(tmp_path, status(0), status(1, step=1235))
    result = top("--folder", str(tmp_path), "--once")
    assert result.exit_code == 0, result.output
    for wanted in (
        "train.py", "job 00c0ffee", "method auto, fidelity balanced", "1,235", "3 rolled back", "50 ms", "20% waiting",
        "780 MB", "40.0× fewer", "2 of 2 on node7", "running", "100 kB", "40% 10 MB", "fc.weight", "threelc ring",
        "1.5", "auto now: gradwire, threelc  (watches)", "Step 20, at the start: gradwire, threelc.", "100 Mb/s, 2 ms",
        "DDP's all-reduce", "200 ms", "250 ms", "← chosen",
    ):  # fmt: skip
        assert wanted in result.output, wanted
    assert max(map(len, result.output.splitlines())) <= 120


def test_ranks_that_do_not_run_say_why() -> None:
    own = ProcessIdentity.current()
    gone = replace(own, started=1)
    found = [
        replace(blocked(0, 1, 12.0), process=own), status(1, process=gone), status(2, process=gone),
        status(3, error="PeerLostError: rank 1"), status(4, end="exited"),
    ]  # fmt: skip
    text = shown(*(replace(each, world_size=7) for each in found))
    assert "◐ rank 0: waits 13 s for rank 1 (recv scatter of fc.weight)" in text
    assert "✗ ranks 1, 2: gone without a goodbye" in text
    assert "✗ rank 3: PeerLostError: rank 1" in text
    assert "✓ rank 4: the script has ended" in text
    assert "… ranks 5, 6: no status in this folder. gradwire top sees the ranks of this machine." in text


def test_links_that_are_gone_or_silent_are_marked() -> None:
    links = (LinkStatus(1, gone=True), LinkStatus(2, busy=0.95, sent_bytes=5, silent_seconds=21.0))
    text = shown(status(0, world_size=3, links=links))
    assert "gone" in text and "95% 5 B silent 21 s" in text


@pytest.mark.parametrize("width", [60, 80, 105, 200])
def test_it_fits_every_terminal(width: int) -> None:
    text = shown(status(0, script="s" * 300), status(1), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "running" in text


def test_before_the_first_step_figures_are_not_made_up() -> None:
    fresh = RankStatus("00c0ffee00c0ffee", 0, 1, ProcessIdentity.current(), method="threelc")
    text = shown(fresh)
    assert "○ starting" in text and "rank 0: no step yet" in text and "none yet" in text


def test_files_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    hostile = "[bold red]\x1b]0;owned\x07[/bold red][link=x]"
    write(tmp_path, status(0, script=hostile, host=hostile, method=hostile, notes=(hostile,), error=hostile, auto=None))
    (tmp_path / "status-\x1b[2J.json").write_text("{}")
    output = top("--folder", str(tmp_path), "--once").output
    assert "\x1b" not in output and "\x07" not in output
    assert "[bold red]" in output and "[/bold red][link=x]" in output and "\\x1b]0;owned" in output
    assert "Not read: status-\\x1b[2J.json: Another version of gradwire wrote it." in " ".join(output.split())


def test_of_several_jobs_the_newest_is_shown_and_others_are_named(tmp_path: Path) -> None:
    own = ProcessIdentity.current()
    write(
        tmp_path,
        status(0, job="a" * 16, started=1e9, process=own, script="old.py"),
        status(0, job="b" * 16, started=2e9, process=own, script="new.py"),
        status(0, job="c" * 16, started=3e9, end="detached", script="done.py"),
    )
    output = top("--folder", str(tmp_path), "--once").output
    assert "job bbbbbbbb" in output
    assert "Other jobs here: aaaaaaaa (old.py, running), cccccccc (done.py, ended). Pass --job to see one." in output
    assert "job aaaaaaaa" in top("--folder", str(tmp_path), "--job", "aaaa").output
    result = top("--folder", str(tmp_path), "--job", "dd")
    assert result.exit_code == 1
    assert f"There is no job 'dd' in {tmp_path}. There are: bbbbbbbb, aaaaaaaa, cccccccc." in result.output


def test_a_frame_can_be_a_picture(tmp_path: Path) -> None:
    write(tmp_path, status(0))
    result = top("--folder", str(tmp_path), "--svg", str(tmp_path / "top.svg"))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "top.svg").read_text()
    assert text.startswith("<svg") and "gradwire&#160;top" in text
    assert "url(http" not in text and "@font-face" not in text, "it asks no server for anything"


def test_bars_are_relative_to_the_highest() -> None:
    assert sparkline([1.0, 0.5, 0.0], 9) == "█▅▁"
    assert sparkline([], 9) == sparkline([0.0], 9) == "–"
    assert len(sparkline([1.0] * 100, 24)) == 24
