"""A target with a way through it that random bytes do not find: `python -m tests.fuzz.maze ARGUMENTS of libFuzzer`."""

from __future__ import annotations

import random
import sys

import atheris

from tests.fuzz import guided

with atheris.instrument_imports(include=["tests.fuzz"]):
    from tests.fuzz.target import BrokenPromiseError, Seed, Target


@atheris.instrument_func
def check(data: bytes) -> bool:
    """Fail four branches deep: once in 2³² random inputs."""
    if data[:1] == b"g" and data[1:2] == b"r" and data[2:3] == b"a" and data[3:4] == b"d":
        raise BrokenPromiseError("the end of the maze was found")
    return False


class Maze(Target):
    name = "maze"
    framed = False

    def corpus(self) -> list[Seed]:
        return [Seed(b"wire")]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        return check(data)


if __name__ == "__main__":
    guided.fuzz(Maze(), sys.argv[1:])
