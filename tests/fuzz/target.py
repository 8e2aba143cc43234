"""What the fuzz campaign tries: a target reads bytes and checks its own promise about them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

import google_crc32c

from gradwire.core.spec import TensorSpec


class BrokenPromiseError(AssertionError):
    """A target did not keep its promise."""


@dataclass(frozen=True)
class Seed:
    """A valid input, and the tensor that it is of."""

    data: bytes
    spec: TensorSpec | None = None


class Target(ABC):
    """A reader of bytes. `check` returns whether it took them, or raises.

    Attributes:
        framed: inputs are frames, whose checksum would hide every other change if it were not put right.
    """

    name: str
    framed = True

    @abstractmethod
    def corpus(self) -> list[Seed]:
        """Valid inputs to start from."""

    @abstractmethod
    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        """Read `data`, made from `seed`; raises anything but the reader's own error where it is broken."""


def put_checksum(data: bytearray, at: int) -> None:
    """Write the checksum of `data`, taken with zeros in its place, to the four bytes from `at`."""
    data[at : at + 4] = bytes(4)
    data[at : at + 4] = google_crc32c.value(bytes(data)).to_bytes(4, "little")
