"""Every code block of README.md and docs/ runs, or says why it does not.

Python blocks that are part of a script run with its rest (`tests.docs.setups`), all of them in few jobs, because
starting one takes longer than most blocks. Commands run in a folder per page, in order, with the page's files.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import BLOCKS, MARKS, ROOT, Block, blocks_of
from tests.docs.setups import ALONE, ON_TWO_RANKS

COMMANDS = ("sh", "console")
SHOWN = ("text", "diff", "json")
"""Languages of blocks that are no code: outputs, differences and figures."""
OWN_TEST = {"docs/extend.md": "tests/docs/test_extend.py"}
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
}  # fmt: skip

HERE = [block for block in BLOCKS if block.page not in OWN_TEST]
SCRIPTS = [block for block in HERE if block.language == "python" and {"with", "after"} & block.marks.keys()]
PROGRAMS = [
    block
    for block in HERE
    if block.language == "python" and not block.title and not {"with", "after"} & block.marks.keys()
]
SHELL = [block for block in HERE if block.language in COMMANDS]


def setup_of(block: Block) -> str:
    """The set-up of a block: its own, or that of the last block before it that has one."""
    before = [each for each in SCRIPTS if each.page == block.page and each.line <= block.line and "with" in each.marks]
    return before[-1].marks["with"]


def params(blocks: list[Block]) -> list[object]:
    """Parameters of a test, with the markers that the blocks ask for."""
    return [
        pytest.param(
            block,
            id=block.name,
            marks=[getattr(pytest.mark, name) for name in ("ci", "root", "bpf", "frameworks") if name in block.marks],
        )
        for block in blocks
    ]


def skip_if_told(block: Block) -> None:
    """Count a block that does not run, with its reason."""
    if "skip" in block.marks:
        pytest.skip(f"{block.name}: {block.marks['skip']}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per page, with the files that the page shows."""
    folder = tmp_path_factory.mktemp("pages")
    for block in HERE:
        (folder / block.place).mkdir(exist_ok=True)
        if block.title and block.language == "python":
            (folder / block.place / block.title).write_text(block.source)
    return folder


def run(command: list[str], where: Path, timeout: float = 250) -> tuple[int, str]:
    """Run a command. Returns its exit code, and what it printed."""
    done = subprocess.run(
        command,
        cwd=where,
        env=ENVIRONMENT,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def job(blocks: list[Block], folder: Path) -> str:
    """What a job of some blocks printed."""
    names = [block.name for block in blocks]
    alone = setup_of(blocks[0]) in ALONE
    launcher = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run([sys.executable, *launcher, "-m", "tests.docs.job", str(folder), *names], ROOT)[1]


@pytest.fixture(scope="module")
def short_job(folder: Path) -> str:
    """The output of all blocks of `make test` that run on two ranks."""
    return job([block for block in SCRIPTS if setup_of(block) in ON_TWO_RANKS and "ci" not in block.marks], folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "block", params([block for block in SCRIPTS if setup_of(block) in ON_TWO_RANKS and "ci" not in block.marks])
)
def test_scripts(block: Block, short_job: str) -> None:
    assert f"done {block.name}\n" in short_job, short_job[-3000:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "block", params([block for block in SCRIPTS if setup_of(block) in ALONE or "ci" in block.marks])
)
def test_scripts_with_a_job_of_their_own(block: Block, folder: Path) -> None:
    said = job([block], folder)
    assert f"done {block.name}\n" in said, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", params(PROGRAMS))
def test_programs(block: Block, folder: Path) -> None:
    skip_if_told(block)
    code, said = run([sys.executable, "-c", block.source], folder / block.place)
    assert code == 0, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", params(SHELL))
def test_commands(block: Block, folder: Path) -> None:
    skip_if_told(block)
    source, where = block.source, folder / block.place
    if block.language == "console":  # commands after a prompt, with what they print
        source = "".join(f"{line[2:]}\n" for line in source.splitlines() if line.startswith("$ "))
    if "until" in block.marks:
        for line in source.splitlines():
            if not line.startswith("gradwire serve "):  # what a server needs
                assert run(["bash", "-ec", line], where)[0] == 0, line
                continue
            command = on_a_host(line, block.marks["host"]) if "host" in block.marks else line
            said = "".join(until(command, where, block.marks["until"]))
            assert block.marks["until"] in said, said
        return
    code, said = run(["bash", "-e", "-o", "pipefail", "-c", source], where)
    assert code == 0, said
    assert block.marks.get("prints", "") in said


def on_a_host(command: str, address: str) -> str:
    """A command in a network namespace of its own, with loopback and an interface eth0 that has this address."""
    network = (
        "ip link set lo up; ip link add eth0 type veth peer name other; ip link set other up",
        f"ip address add {address}/24 dev eth0; ip link set eth0 up",
    )
    return f"unshare -n sh -ec {shlex.quote('; '.join([*network, f'exec {command}']))}"


def until(source: str, where: Path, text: str) -> Iterator[str]:
    """Run a command that does not end by itself, until it has printed `text`. Yields its lines."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {source}"], cwd=where, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        for line in server.stdout:
            yield line
            if text in line:
                break
        server.terminate()  # a background job of a shell may ignore SIGINT


def test_every_block_has_a_known_language_and_known_marks() -> None:
    for block in HERE:
        assert block.language in ("python", *COMMANDS, *SHOWN), block.name
        assert block.marks.keys() <= MARKS, block.name
        assert "with" not in block.marks or block.marks["with"] in ON_TWO_RANKS | ALONE, block.name


def test_the_commands_of_the_readme_are_targets() -> None:
    """It has no marks: its first block has `make` targets, and the test of the example runs the rest."""
    blocks = list(blocks_of(ROOT / "README.md"))
    assert not [block.name for block in blocks if block.language not in ("", "diff")]
    commands = [line for line in blocks[0].source.splitlines() if line.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert commands
    assert all(f"\n{line.split()[1]}:" in makefile for line in commands)


def test_every_file_of_a_page_is_run_by_a_command_of_it() -> None:
    for block in HERE:
        if block.title and block.language == "python":
            later = [each for each in SHELL if each.page == block.page]
            words = [word for each in later for word in shlex.split(each.source, comments=True)]
            stem = block.title.removesuffix(".py")
            assert any(word == block.title or word.startswith(f"{stem}:") for word in words), block.name
