"""The fuzz campaign guided by coverage (atheris): inputs that reach new branches are kept, and changed further.

    python -m tests.fuzz.guided --cases 20000                        # frames, handshakes, and four decoders
    python -m tests.fuzz.guided --cases 1000000 --minutes 60 --record tests/fuzzed.csv       # over several sittings
    python -m tests.fuzz.guided --target decode:lossless --cases 100000
    python -m tests.fuzz.guided --target decode:lossless --replay build/fuzz/crash-1234

Targets and their promises are those of `tests.fuzz.campaign`. What is guided are the Python layers of gradwire: atheris
rewrites their bytecode. The kernels are compiled by Numba, which cannot compile such bytecode, so inside a kernel
nothing is seen. `tests.fuzz` makes up in numbers for what guidance does not reach there.

The first two bytes of an input choose the valid input that it belongs to, and what else the target draws. Inputs that
have reached something new are kept in a folder for each target, with which the next sitting begins.
"""

from __future__ import annotations

import importlib.util
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tests.fuzz.record import BLOCK, Minutes, Record, RecordFile

if TYPE_CHECKING:
    from tests.fuzz.target import Seed, Target

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "fuzz"
CHOSEN = (
    *("frame", "stream", "handshake", "parameter server's words", "aggregation server's words"),
    *("decode:threelc", "decode:lossless", "decode:topk", "decode:qsgd"),
)
HANG_SECONDS, MEMORY_MB = 30, 2048
COMPILED = ("kernels", "lang")  # by Numba, which must see bytecode as it is


def check(target: Target, corpus: list[Seed], data: bytes) -> None:
    """Let a target check an input, whose first two bytes choose what else it needs."""
    from tests.fuzz.campaign import put_right

    if len(data) < 2:
        return
    body, draw = bytearray(data[2:]), random.Random(data[1])
    if target.framed and draw.random() < 0.5:
        put_right(body)
    target.check(bytes(body), corpus[data[0] % len(corpus)], draw)


def fuzz(target: Target, arguments: list[str]) -> None:
    """Give this process to libFuzzer, which ends it."""
    import atheris

    corpus = target.corpus()
    for start in corpus:  # compiles what is compiled
        target.check(start.data, start, random.Random(0))
    atheris.Setup([sys.argv[0], *arguments], lambda data: check(target, corpus, data))
    atheris.Fuzz()


def instrumented() -> dict[str, Target]:
    """Import all targets by way of atheris."""
    import atheris

    with atheris.instrument_imports(include=["gradwire", "tests.fuzz"], exclude=compiled_modules()):
        from tests.fuzz.targets import targets
    return targets()


def compiled_modules() -> list[str]:
    """Names of all modules that Numba compiles; atheris asks for each."""
    found = importlib.util.find_spec("gradwire")
    assert found is not None and found.submodule_search_locations, "gradwire is installed"
    base = Path(found.submodule_search_locations[0]).parent
    paths = (path for room in COMPILED for path in (base / "gradwire" / room).rglob("*.py"))
    return [".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def write_corpus(target: Target, folder: Path) -> None:
    """Write the valid inputs of a target into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, start in enumerate(target.corpus()):
        (folder / f"valid-{index}").write_bytes(bytes([index % 256, 0]) + start.data)


class Outcome(NamedTuple):
    """What came of one target.

    Attributes:
        cases: Inputs that were tried.
        features: Branches, and counts of them, that were reached; at the start and in the end.
        failure: The end of the log, or nothing.
    """

    cases: int
    features: tuple[int, int]
    failure: str


def run(command: list[str], log: Path) -> Outcome:
    """Run the process of one target, with its output in a file."""
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    said = log.read_text(errors="replace")
    features = [int(found) for found in re.findall(r"^#\d+\t(?:INITED|DONE) +.*\bft: (\d+)", said, re.MULTILINE)]
    cases = [int(found) for found in re.findall(r"^stat::number_of_executed_units: (\d+)", said, re.MULTILINE)]
    if code or len(features) != 2:
        return Outcome(sum(cases), (0, 0), f"exit code {code}\n{said[-3000:]}")
    return Outcome(sum(cases), (features[0], features[1]), "")


def main(
    cases: Annotated[int, typer.Option(help="Inputs for each target.")] = 20_000,
    target: Annotated[list[str] | None, typer.Option(help="One target; may be repeated.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the inputs that are kept, and of logs.")] = FOLDER,
    replay: Annotated[Path | None, typer.Option(help="Run one input that a failure has written.")] = None,
    minutes: Minutes = math.inf,
    record: RecordFile = None,
    inside: Annotated[bool, typer.Option(help="Be the process of one target.", hidden=True)] = False,
) -> None:
    """Let coverage guide the choice of bytes for the readers."""
    if importlib.util.find_spec("atheris") is None:
        print("Guidance needs the package atheris. Run pip install atheris, or python -m tests.fuzz, which needs none.")
        raise typer.Exit(2)
    chosen = target or list(CHOSEN)
    if inside or replay:
        [name] = chosen
        one = instrumented()[name]
        if replay:
            check(one, one.corpus(), replay.read_bytes())
            return
        kept = folder / re.sub(r"\W+", "-", name)
        write_corpus(one, kept)
        limits = [f"-runs={cases}", f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={MEMORY_MB}", "-max_len=8192"]
        fuzz(one, [*limits, "-print_final_stats=1", f"-artifact_prefix={kept}-", str(kept)])
    folder.mkdir(parents=True, exist_ok=True)
    failed, end, book = 0, time.monotonic() + 60 * minutes, Record(record, "guided")
    for name in book.due(chosen, cases, end):
        began, log = time.monotonic(), folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"
        block = min(BLOCK, cases - book.cases[name])
        own = ["--inside", "--cases", str(block), "--target", name, "--folder", str(folder)]
        found = run([sys.executable, "-m", "tests.fuzz.guided", *own], log)
        book.add(name, found.cases, found.failure)
        failed += bool(found.failure)
        rate = found.cases / (time.monotonic() - began)
        grown = "features {} to {}".format(*found.features)
        print(f"{name:28} {found.cases:9} cases, {rate:6.0f}/s, {grown}  {found.failure or 'ok'}", flush=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
