"""Any bytes lead to a result or to one typed error: the campaign that tries.

    python -m benchmarks.fuzz --cases 1000000              # the whole, for a release: a million cases a target
    python -m benchmarks.fuzz --target decode:threelc      # one reader
    python -m benchmarks.fuzz --replay fuzz-failure.bin --target decode:threelc

Mutates valid input (flips, cuts, extensions, splices, overwritten integers) and makes some up. A target checks its
own promise; a hang, a foreign exception and growing memory are failures whatever the target. Runs are repeated by
their seed. `tests/wire/test_fuzz.py` is the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import google_crc32c
import numpy as np
import torch
from benchmarks.fuzz_aggregation import aggregation_targets
from benchmarks.fuzz_parameters import ServerTarget, UpdateTarget, WordsTarget
from benchmarks.fuzz_target import BrokenPromiseError, Seed, Target

from gradwire.compressors.base import registry
from gradwire.core.context import Context
from gradwire.core.errors import FrameError, PayloadError, SyncError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels.prefix_code import PrefixCode
from gradwire.protocol.conversation import Conversation, Ends
from gradwire.protocol.handshake import Handshake, JobKey, Member
from gradwire.wire.frame import DATA_KINDS, HEADER_BYTES, FrameKind, Header, pack, parse, unpack, verify, without_seal
from gradwire.wire.payload import Payload

HANG_SECONDS = 5
# What caches, counters and the allocator may take over a campaign; a decompression bomb takes more at once.
GROWTH_BYTES = 256 << 20
EDGES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


class CodeTarget(Target):
    """The lengths of a prefix code are taken only in the one form that they are written in."""

    name = "prefix code"
    framed = False

    def corpus(self) -> list[Seed]:
        draw = np.random.default_rng(0)
        counts = [np.ones(256, np.int64), np.zeros(256, np.int64), *(draw.geometric(0.01, 256) for _ in range(8))]
        return [Seed(PrefixCode.of(each).to_bytes()) for each in counts]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        try:
            code = PrefixCode.from_bytes(data)
        except PayloadError:
            return False
        if code.to_bytes() != data:
            raise BrokenPromiseError("lengths in another form than ours were taken")
        return True


class FrameTarget(Target):
    """A frame is taken only in the one form that `pack` writes."""

    name = "frame"

    def corpus(self) -> list[Seed]:
        return [Seed(frame) for frame in one_of_each_kind()]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        with contextlib.suppress(FrameError):
            unpack(data)
        try:
            header, body = parse(data)
        except FrameError:
            return False
        verify(header, body)
        if pack(without_seal(header), body) != data:
            raise BrokenPromiseError("a frame in another form than ours was taken")
        return True


class StreamTarget(Target):
    """A stream in any pieces ends in data frames, a `SyncError` or a wait for more."""

    name = "stream"

    def corpus(self) -> list[Seed]:
        frames = [pack(Header(kind, sender=4, epoch=5), bytes(n)) for kind in sorted(DATA_KINDS) for n in (0, 9)]
        ends = [pack(Header(FrameKind(kind), sender=4, epoch=5)) for kind in (5, 6, 7)]
        return [Seed(a + b) for a in frames for b in [*frames, *ends, *one_of_each_kind()]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        talk = Conversation(Ends(0, 4, 5), timedelta(seconds=1), now=0.0)
        talk.begin(admit_small, now=0.0)
        try:
            taken = sum(1 for _ in feed(talk, data, rng))
        except SyncError:
            return False
        return taken > 0


class HandshakeTarget(Target):
    """Only an unchanged handshake succeeds."""

    name = "handshake"

    def __init__(self) -> None:
        self.key = JobKey.draw()

    def corpus(self) -> list[Seed]:
        connector, acceptor = self.ends()
        frames = [connector.opening()]
        while frames[-1]:
            frames.append(answer(acceptor if len(frames) % 2 else connector, frames[-1]))
        return [Seed(frame) for frame in frames[:-1]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        connector, acceptor = self.ends()
        turn, at, frame = 0, rng.randrange(4), connector.opening()
        in_flight = rng.random() < 0.5  # damage the frame that is due, or put another in its place
        try:
            while frame:
                if turn == at:
                    frame = damage(frame, rng) if in_flight else data
                frame = answer(connector if turn % 2 else acceptor, frame)
                turn += 1
        except FrameError:
            pass
        if connector.done or (acceptor.done and at != 3):
            raise BrokenPromiseError(f"a handshake with a foreign frame in turn {at} succeeded")
        return False

    def ends(self) -> tuple[Handshake, Handshake]:
        return (
            Handshake(Member("g", 2, 4, 5), self.key, frozenset({1}), connect=True),
            Handshake(Member("g", 1, 4, 5), self.key, frozenset({2, 3}), connect=False),
        )


class DecoderTarget(Target):
    """A payload decodes to a tensor of the receiver's spec or is a `PayloadError`."""

    framed = False

    SPECS = tuple(
        TensorSpec(shape, dtype)
        for shape in ((0,), (1,), (5,), (33, 9), (1500,))
        for dtype in (torch.float32, torch.bfloat16)
    )

    def __init__(self, compressor: str, shared: bool = False, **options: Any) -> None:
        named = "".join(f" {key}={value}" for key, value in options.items())
        self.name = f"decode:{compressor}{named}" + " with shared values" * shared
        self.compressor = registry.make(compressor, **options)
        self.shared = shared

    def corpus(self) -> list[Seed]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for spec in self.SPECS:
            dense = torch.randn(spec.shape, generator=generator)
            sparse = dense * (torch.rand(spec.shape, generator=generator) < 0.05)
            for values in (dense, sparse, torch.zeros(spec.shape)):
                payload = self.compressor.encode(values.to(spec.dtype), self.context(spec), stats=self.stats(spec))
                found.append(Seed(payload.body.tobytes(), spec))
        return found

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        spec = seed.spec if seed.spec is not None and rng.random() < 0.9 else rng.choice(self.SPECS)
        payload = Payload(np.frombuffer(data, dtype=np.uint8), nonfinite=rng.random() < 0.02)
        try:
            found = self.compressor.decode(payload, self.context(spec), stats=self.stats(spec))
        except PayloadError:
            return False
        if tuple(found.shape) != spec.shape or found.dtype != spec.dtype:
            raise BrokenPromiseError(f"decoded to {found.dtype} of {tuple(found.shape)}, expected {spec}")
        self.check_other_ways(payload, spec, found, rng)
        return True

    def check_other_ways(self, payload: Payload, spec: TensorSpec, found: torch.Tensor, rng: random.Random) -> None:
        """What one way of decoding takes, the others take, too."""
        ctx, stats = self.context(spec), self.stats(spec)
        out = torch.full(spec.shape, 7, dtype=spec.dtype)
        self.compressor.decode(payload, ctx, out=out, stats=stats)
        if as_array(out).tobytes() != as_array(found).tobytes():
            raise BrokenPromiseError("decode with out= gives another result")
        self.compressor.decode(payload, ctx, out=torch.zeros(spec.shape), accumulate=True, stats=stats)
        if self.compressor.summable and self.shared and not payload.nonfinite:  # those are not added
            lanes = np.zeros(self.compressor.num_lanes(spec), self.compressor.lane_dtype(2))
            self.compressor.lift(payload, ctx, lanes)

    def stats(self, spec: TensorSpec) -> list[np.ndarray]:
        """What a preliminary round gave, where there was one."""
        if not self.shared:
            return []
        return [np.ones(count, np.float32) for count, _ in self.compressor.stats_spec(spec)]

    def context(self, spec: TensorSpec) -> Context:
        return Context(name="layer", step=3, rank=1, world_size=2, seed=5, spec=spec)


class PackedFloatsTarget(DecoderTarget):
    """The same for longer tensors and every element type; and what is taken is the one encoding of its tensor."""

    SPECS = tuple(
        TensorSpec((size,), dtype)
        for size in (40, 2000, 20_000)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )

    def __init__(self, compressor: str) -> None:
        super().__init__(compressor)
        self.name += " long"

    def check_other_ways(self, payload: Payload, spec: TensorSpec, found: torch.Tensor, rng: random.Random) -> None:
        super().check_other_ways(payload, spec, found, rng)
        again = self.compressor.encode(found, self.context(spec))
        if bytes(again.body) != bytes(payload.body):
            raise BrokenPromiseError("a payload in another form than ours was taken")


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


def one_of_each_kind() -> list[bytes]:
    kinds = [pack(Header(kind, sender=4, epoch=5, count=4, dtype=1), bytes(range(34))) for kind in FrameKind]
    return [*kinds, pack(Header(FrameKind.PAYLOAD, sender=4, epoch=5), bytes(300))]


def admit_small(peer: int, header: Header) -> None:
    if header.length > 1 << 16:
        raise FrameError("larger than anything that is due")


def feed(talk: Conversation, data: bytes, rng: random.Random) -> Iterator[tuple[Header, np.ndarray]]:
    at = 0
    while at < len(data):
        room = talk.wanted()
        count = min(rng.choice((1, 50, 72, 100, 1 << 16)), len(room), len(data) - at)
        room[:count] = data[at : at + count]
        at += count
        yield from talk.advance(count, now=0.0)


def answer(handshake: Handshake, frame: bytes) -> bytes:
    header, body = parse(frame)
    handshake.admit(header)
    return handshake.receive(header, body)


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


def damage(frame: bytes, rng: random.Random) -> bytes:
    """Return `frame` with one byte changed outside its checksum, and the checksum put right."""
    data = bytearray(frame)
    at = rng.choice([*range(64), *range(68, len(data))])
    data[at] ^= rng.randrange(1, 256)
    data[64:68] = bytes(4)
    data[64:68] = google_crc32c.value(bytes(data)).to_bytes(4, "little")
    return bytes(data)


def put_right(data: bytearray) -> None:
    """Give the frame at the start of `data` the length of what follows, and its checksum."""
    if len(data) >= HEADER_BYTES:
        data[56:64] = (len(data) - HEADER_BYTES).to_bytes(8, "little")
        data[64:68] = bytes(4)
        data[64:68] = google_crc32c.value(bytes(data)).to_bytes(4, "little")


def targets() -> dict[str, Target]:
    """All targets by name: the readers of the wire, and the decoder of every registered compressor.

    With its defaults, and with zero runs in the language besides, which no default has.
    """
    made: list[Target] = [FrameTarget(), StreamTarget(), HandshakeTarget(), DecoderTarget("ternary", zero_run=True)]
    made += [CodeTarget(), PackedFloatsTarget("lossless"), WordsTarget(), ServerTarget(), UpdateTarget()]
    made += aggregation_targets()
    for name in registry.names():
        made.append(DecoderTarget(name))
        if registry.make(name).needs_stats:
            made.append(DecoderTarget(name, shared=True))
    return {target.name: target for target in made}


def run(target: Target, cases: int, seed: int, reproducer: Path | None = None) -> Outcome:
    """Try `cases` inputs on one target; stops at the first failure and writes its input down."""
    rng = random.Random(f"{seed}/{target.name}")
    corpus = target.corpus()
    for start in corpus:  # warms up compiled code, so that its memory is not counted
        target.check(start.data, start, rng)
    outcome = Outcome(target.name, 0, 0, 0, 0.0, 0)
    memory, began = peak_bytes(), time.monotonic()
    valid = {start.data for start in corpus}
    for case in range(cases):
        if case % 1000 == 0:  # compiled code does not see the alarm: then at least say where, and end
            faulthandler.dump_traceback_later(100, exit=True)
        data, start = mutate(corpus, rng, target.framed)
        if data in valid:
            continue
        try:
            with no_hang():
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
def no_hang() -> Iterator[None]:
    """Raise in the main thread when the block takes too long."""

    def alarm(number: int, frame: FrameType | None) -> None:
        raise BrokenPromiseError(f"no end within {HANG_SECONDS} s")

    previous = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="inputs a target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="one target; may be repeated; default all")
    parser.add_argument("--replay", type=Path, help="run one input, as a failure has written it")
    parser.add_argument("--json", action="store_true", help="one line of JSON a target")
    options = parser.parse_args()
    known = targets()
    chosen = options.target or list(known)
    for name in chosen:
        if name not in known:
            parser.error(f"unknown target {name!r}; known: {', '.join(known)}")
    if options.replay:
        for name in chosen:
            replay(known[name], options.replay.read_bytes())
        return 0
    failed = 0
    for name in chosen:
        if sys.stderr.isatty():
            print(f"\r{name} ...", end="", file=sys.stderr)
        reproducer = Path(f"fuzz-failure-{name.replace(':', '-')}.bin")
        outcome = run(known[name], options.cases, options.seed, reproducer)
        failed += bool(outcome.failure)
        print(json.dumps(asdict(outcome)) if options.json else line(outcome), flush=True)
        if outcome.failure:
            print(f"  input in {reproducer}; seed {options.seed}", file=sys.stderr)
    return 1 if failed else 0


def replay(target: Target, data: bytes) -> None:
    """Read one input as every tensor of the corpus."""
    for spec in {start.spec for start in target.corpus()}:
        for attempt in range(20):
            target.check(data, Seed(data, spec), random.Random(attempt))


def line(outcome: Outcome) -> str:
    rate = outcome.cases / max(outcome.seconds, 1e-9)
    return (
        f"\r{outcome.target:20} {outcome.cases:9} cases, {outcome.taken:8} taken, {outcome.refused:8} refused, "
        f"{rate:8.0f}/s, memory +{outcome.grown_bytes >> 20} MiB  {outcome.failure or 'ok'}"
    )


if __name__ == "__main__":
    sys.exit(main())
