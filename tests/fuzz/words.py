"""Target of the fuzz campaign: first words of a connection, which are JSON in a frame."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from gradwire.core.errors import FrameError
from tests.fuzz.target import BrokenPromiseError, Seed, Target


class WordsTarget(Target):
    """Words are taken if the same are read again from what is written of them.

    Args:
        name: of the target.
        words: valid ones.
        readers: functions that read words and write what was read.
    """

    framed = False

    def __init__(
        self,
        name: str,
        words: Sequence[bytes],
        readers: Sequence[tuple[Callable[[bytes], Any], Callable[[Any], bytes]]],
    ) -> None:
        self.name, self.words, self.readers = name, words, readers

    def corpus(self) -> list[Seed]:
        return [Seed(each) for each in self.words]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        data = foul(data, rng)
        taken = 0
        for read, write in self.readers:
            try:
                found = read(data)
            except FrameError:
                continue
            taken += 1
            if write(read(write(found))) != write(found):
                raise BrokenPromiseError("what was taken is read differently a second time")
        return taken > 0


def foul(data: bytes, rng: random.Random) -> bytes:
    """Now and then, put a value of another kind in the place of one in the JSON: bytes at random seldom are JSON."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places: list[tuple[object, object]] = []
    gather(said, places)
    if not places or rng.random() < 0.2:
        return data
    holder, key = rng.choice(places)
    strange = (None, -1, 1 << 70, -1.5, float("nan"), "", "none", "topk:ratio=2", "a" * 99, True, [], {}, [[1]], [-1])
    holder[key] = rng.choice(strange)  # type: ignore[index]
    return json.dumps(said).encode()


def gather(said: object, places: list[tuple[object, object]]) -> None:
    """All places of a JSON value that hold another."""
    items = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    for key, value in items:
        places.append((said, key))
        gather(value, places)
