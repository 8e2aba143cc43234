"""Golden source: the generated code of a few algorithms, so that every change of it is seen.

Update it, after reading the difference, with

    python -m tests.golden.generated.golden
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradwire.lang.ir import Program
from gradwire.lang.targets import numba, triton
from tests.lang import algorithms

FOLDER = Path(__file__).parent
BACKENDS: dict[str, Callable[[Program], str]] = {"cpu": numba.emit, "triton": triton.emit}
# Few but telling: two sweeps and random numbers; reductions that share a sweep; blocks; lists; hashes; trits; runs;
# ranks.
NAMES = ("between", "two_means", "block_scales", "sampled", "hashed", "ternary", "few_trits", "shared_scale")


def path(name: str, backend: str) -> Path:
    return FOLDER / f"{name}_{backend}.py.txt"


def render(name: str, backend: str) -> str:
    return BACKENDS[backend](algorithms.program(name))


def main() -> None:
    for name in NAMES:
        for backend in BACKENDS:
            path(name, backend).write_text(render(name, backend))
            print(f"wrote {path(name, backend).name}")


if __name__ == "__main__":
    main()
