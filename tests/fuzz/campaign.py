"""The fuzz campaign: damaged and made-up bytes, each of which must lead to a result or to one typed error.

    python -m tests.fuzz --cases 1000000 --minutes 60 --record tests/fuzzed.csv   # a million, over several sittings
    python -m tests.fuzz --target decode:threelc      # one reader
    python -m tests.fuzz --replay fuzz-failure.bin --target decode:threelc

Mutates valid input (flips, cuts, extensions, splices, overwritten integers) and makes some up. A target checks its own
promise. A hang, an unexpected exception, or growing memory is a failure for every target. The seed repeats a run.
`test_campaign.py` is the short form.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gradwire.wire.frame import HEADER_BYTES
from tests.fuzz.target import BrokenPromiseError, Seed, Target, put_checksum

HANG_SECONDS = 5
# What caches, counters and the allocator may take over a campaign; a decompression bomb takes more at once.
GROWTH_BYTES = 256 << 20
EDGES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@dataclass
class Outcome:
    """What came of the cases of one target."""

    target: str
    cases: int
    taken: int
    refused: int
    seconds: float
    grown_bytes: int
    failure: str = ""


def mutate(corpus: list[Seed], rng: random.Random, framed: bool) -> tuple[bytes, Seed]:
    """Return one input, mostly a damaged valid one, and what it was made from."""
    seed = rng.choice(corpus)
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 4, 71, 72, 73, 200, 2000))), seed
    data = bytearray(seed.data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        change = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del data[at:]
        elif change == 2:
            data += rng.randbytes(rng.choice((1, 2, 8, 100)))
        elif change == 3:
            other = rng.choice(corpus).data
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            width = rng.choice((1, 2, 4, 8))
            data[at : at + width] = (rng.choice(EDGES) % (1 << 8 * width)).to_bytes(width, "little")
    if framed and rng.random() < 0.5:
        put_right(data)
    return bytes(data), seed


def put_right(data: bytearray) -> None:
    """Give the frame at the start of `data` the length of what follows, and its checksum."""
    if len(data) >= HEADER_BYTES:
        data[56:64] = (len(data) - HEADER_BYTES).to_bytes(8, "little")
        put_checksum(data, 64)


def run(target: Target, cases: int, seed: int, reproducer: Path | None = None) -> Outcome:
    """Try `cases` inputs on one target; stops at the first failure and writes its input down."""
    rng = random.Random(f"{seed}/{target.name}")
    corpus = target.corpus()
    for start in corpus:  # warms up compiled code, so that its memory is not counted
        target.check(start.data, start, rng)
    outcome = Outcome(target.name, 0, 0, 0, 0.0, 0)
    memory, began = peak_bytes(), time.monotonic()
    valid = {start.data for start in corpus}
    with no_hang() as begin:
        for attempt in itertools.count():
            if outcome.cases == cases:
                break
            if attempt % 100 == 0:  # compiled code does not see the alarm: then at least say where, and end
                faulthandler.dump_traceback_later(300, exit=True)  # by the clock: with low priority, 1,000 took 100 s
            data, start = mutate(corpus, rng, target.framed)
            if data in valid:
                continue
            try:
                begin()
                taken = target.check(data, start, rng)
            except Exception as error:
                outcome.failure = f"{type(error).__name__}: {error}"
                if reproducer is not None:
                    reproducer.write_bytes(data)
                break
            outcome.cases += 1
            outcome.taken += taken
            outcome.refused += not taken
    faulthandler.cancel_dump_traceback_later()
    outcome.seconds = time.monotonic() - began
    outcome.grown_bytes = peak_bytes() - memory
    if not outcome.failure and outcome.grown_bytes > GROWTH_BYTES:
        outcome.failure = f"memory grew by {outcome.grown_bytes} bytes"
    return outcome


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def no_hang() -> Iterator[Callable[[], None]]:
    """Raise in the main thread when a case takes too much time of the processor, or far too much of the clock.

    What is yielded is called at the beginning of each case.
    """

    def alarm(number: int, frame: FrameType | None) -> None:
        raise BrokenPromiseError(f"no end within {HANG_SECONDS} s")

    timers = (signal.SIGPROF, signal.ITIMER_PROF, HANG_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, 12 * HANG_SECONDS)
    previous = [signal.signal(number, alarm) for number, _, _ in timers]

    def begin() -> None:
        for _, timer, seconds in timers:
            signal.setitimer(timer, seconds)

    try:
        yield begin
    finally:
        for (number, timer, _), handler in zip(timers, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
