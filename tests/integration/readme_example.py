"""The README's example under torchrun, many times over: it must end with exit code 0 however the script ends.

    python -m tests.integration.readme_example --runs 200 --csv readme_example.csv

The runs are spread evenly over: two and four ranks; with and without `detach()`; with and without
`destroy_process_group()`; ranks that end together and seconds apart; with and without evaluation and `torch.save` on
one rank. Two run at a time, since ranks that end apart leave the processor idle.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from tests.integration.launch import ROOT

LIMIT_SECONDS = 180


@dataclass(frozen=True)
class Ending:
    """One combination."""

    ranks: int
    detach: bool
    destroy: bool
    apart: bool
    evaluate: bool

    def __str__(self) -> str:
        chosen = [field.name for field in fields(self)[1:] if getattr(self, field.name)]
        return f"{self.ranks} ranks, {', '.join(chosen) or 'plain'}"


# Ranks change fastest, then whether they end apart, so that a few runs already differ.
ENDINGS = [
    Ending(ranks, detach, destroy, apart, evaluate)
    for detach, evaluate, destroy, apart, ranks in itertools.product(*[(False, True)] * 4, (2, 4))
]


def timed(ending: Ending) -> tuple[Ending, str, float]:
    """Run the example once; return what was wrong, or nothing, and the seconds it took."""
    start = time.monotonic()
    problem = run(ending)
    return ending, problem, round(time.monotonic() - start, 1)


def run(ending: Ending) -> str:
    """Run the example once; return what was wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model.pt"
        flags = [f"--{name}" for name in ("detach", "destroy", "apart") if getattr(ending, name)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ending.ranks}"),
            *("-m", "tests.integration.jobs.readme", *flags, *(["--save", str(saved)] if ending.evaluate else [])),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GRADWIRE_DUMP_DIR": folder}
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            return f"no end within {LIMIT_SECONDS} s\n{error.stdout}\n{error.stderr}"
        if ended.returncode:
            return f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        if ending.evaluate and torch.load(saved)["accuracy"] < 0.5:
            return "nothing learned"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--csv", type=Path, default=Path(os.devnull), help="a line for each run goes here")
    options = parser.parse_args()
    good, runs, begun = Counter[Ending](), Counter[Ending](), time.monotonic()
    with options.csv.open("w", newline="", buffering=1) as file, ThreadPoolExecutor(options.jobs) as pool:
        table = csv.writer(file)
        table.writerow([*(field.name for field in fields(Ending)), "good", "seconds"])
        endings = itertools.islice(itertools.cycle(ENDINGS), options.runs)
        for number, (ending, problem, seconds) in enumerate(pool.map(timed, endings), 1):
            runs[ending] += 1
            good[ending] += not problem
            table.writerow([*astuple(ending), not problem, seconds])
            print(f"{number:3}/{options.runs} {seconds:5.1f} s  {ending}: {problem or 'good'}", flush=True)
    print(f"\n{'good':>5}{'of':>4}")
    for ending in runs:
        print(f"{good[ending]:5}{runs[ending]:4}  {ending}")
    print(f"{good.total():5}{runs.total():4}  in {(time.monotonic() - begun) / 60:.1f} minutes")
    return int(good != runs)


if __name__ == "__main__":
    sys.exit(main())
