"""Targets of the fuzz campaign: what a parameter server and its workers read of each other."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

from gradwire.compressors.base.registry import compressor_of
from gradwire.core.errors import FrameError, PayloadError
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.session import (
    Groups,
    ParameterConfig,
    TrainingConfig,
    TrainingJoin,
    TrainingWelcome,
    decode_groups,
    encode_groups,
)
from gradwire.parameter_server.shard import ParameterShard
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.parameter_server.update import add_change, change_spec, join_update, pull_context, split_update
from gradwire.wire.frame import FrameKind, Header, pack, parse
from tests.fuzz.target import BrokenPromiseError, Seed, Target
from tests.fuzz.words import WordsTarget

EPOCH = 7
WORKERS = 2
GROUPS: Groups = ({"lr": 0.5, "betas": [0.9, 0.999], "foreach": None},)
SPEC = TensorSpec((70,))


@cache
def training() -> TrainingConfig:
    """What two workers and a server agree on."""
    made = (
        ParameterConfig("a", (70,), "float32", "threelc", "threelc", 0, True, True),
        ParameterConfig("b", (3, 5), "bfloat16", "none", "none", 0, False, False),
    )
    return TrainingConfig(WORKERS, 0, 0, "SGD", made)


def words_target() -> WordsTarget:
    """First words of both ends, and hyperparameters."""
    joins = [TrainingJoin(training(), GROUPS, 1), TrainingJoin(training(), GROUPS, 2, (0, 3))]
    welcome = TrainingWelcome(False, (1, 2), (0, -1), (-1, 1))
    return WordsTarget(
        "parameter server's words",
        [*(join.to_bytes() for join in joins), welcome.to_bytes(), encode_groups(GROUPS)],
        [(TrainingJoin.from_bytes, TrainingJoin.to_bytes),
         (lambda body: TrainingWelcome.from_bytes(body, 2), TrainingWelcome.to_bytes), (decode_groups, encode_groups)],
    )  # fmt: skip


class ServerTarget(Target):
    """A server takes a frame, or refuses it and serves the other worker as before."""

    name = "parameter server"

    def corpus(self) -> list[Seed]:
        step(ServerStateMachine(WORKERS, EPOCH, ParameterShard()))  # loads compiled code
        joins = [join_frame(worker) for worker in range(WORKERS)]
        values = [model_frame(tensor) for tensor in range(2)]
        return [Seed(frame) for frame in [*joins, *values, push_frame(0), push_frame(1), groups_frame()]]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        machine = ServerStateMachine(WORKERS, EPOCH, ParameterShard())
        valid = [join_frame(0), model_frame(0), model_frame(1), groups_frame(), push_frame(0)]
        for frame in valid[: rng.randrange(len(valid) + 1)]:
            say(machine, 0, frame)
        try:
            say(machine, 0, data)
        except FrameError:
            machine.leave(0)
        else:
            return True
        if rng.random() < 0.9:  # a step takes as long as many refusals
            return False
        if len(step(machine)) != WORKERS:
            raise BrokenPromiseError("a refused frame held up the step")
        return False


class UpdateTarget(Target):
    """A worker takes an update that decodes, and counts workers that there are."""

    name = "update"
    framed = False

    def corpus(self) -> list[Seed]:
        ctx = pull_context(training(), 0, 0)
        values = torch.randn(70, generator=torch.Generator().manual_seed(0))
        payload = compressor_of("threelc").encode(values, ctx)
        return [Seed(join_update(counted, WORKERS, payload).tobytes(), change_spec(SPEC)) for counted in ([0], [0, 1])]

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        header = Header(FrameKind.DELTA, sender=WORKERS, epoch=EPOCH)
        values = torch.zeros(70)
        try:
            counted, payload = split_update(header, np.frombuffer(data, np.uint8), WORKERS)
            add_change(compressor_of("threelc"), payload, pull_context(training(), 0, 0), values)
        except (FrameError, PayloadError):
            if values.any():
                raise BrokenPromiseError("a refused update changed the values") from None
            return False
        if not counted <= set(range(WORKERS)):
            raise BrokenPromiseError(f"counted {sorted(counted)} of {WORKERS} workers")
        return True


def say(machine: ServerStateMachine, worker: int, frame: bytes) -> list[object]:
    """Bring a frame to the server as its connection would."""
    header, body = parse(frame)
    machine.admit(worker, header)
    return list(machine.receive(worker, header, body))


def step(machine: ServerStateMachine) -> list[object]:
    """Both workers come, again or for the first time, and push; returns what the last one's push leads to."""
    answers: list[object] = []
    for worker in range(WORKERS):
        say(machine, worker, join_frame(worker))
        if not machine.initialized:
            say(machine, 0, model_frame(0))
            say(machine, 0, model_frame(1))
        answers = say(machine, worker, push_frame(worker))
    return answers


@cache
def join_frame(worker: int) -> bytes:
    return pack(Header(FrameKind.JOIN, sender=worker, epoch=EPOCH), TrainingJoin(training(), GROUPS, 1).to_bytes())


@cache
def groups_frame() -> bytes:
    return pack(Header(FrameKind.GROUPS, sender=0, epoch=EPOCH), encode_groups(GROUPS))


@cache
def model_frame(tensor: int) -> bytes:
    spec = training().tensors[tensor].spec
    header, body = ParameterSlot(tensor, training(), 0, EPOCH).first_values(torch.ones(spec.shape, dtype=spec.dtype))
    return pack(header, body.tobytes())


@cache
def push_frame(worker: int) -> bytes:
    slot = ParameterSlot(0, training(), worker, EPOCH)
    frame = slot.push(torch.linspace(-1, 1, 70), 0)
    assert frame is not None
    header, body = frame
    return pack(header, body.tobytes())
