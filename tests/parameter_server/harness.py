"""Workers and a server in one thread: frames go from hand to hand, in the order that the test wants."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch

from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.session import (
    Groups,
    ParameterConfig,
    TrainingConfig,
    TrainingJoin,
    TrainingWelcome,
    encode_groups,
)
from gradwire.parameter_server.shard import ParameterShard
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.wire.frame import FrameKind, Header, parse, seal

EPOCH = 7
LR = 0.5
GROUPS = ({"lr": LR},)


def make_config(
    shapes=((70,), (3, 5)),
    *,
    workers=3,
    backups=0,
    push="threelc",
    pull="threelc",
    feedback=True,
    optimizer="SGD",
    staleness=0,
    late="keep",
) -> TrainingConfig:
    tensors = tuple(
        ParameterConfig(f"p{i}", tuple(shape), "float32", push, pull, 0, feedback, feedback)
        for i, shape in enumerate(shapes)
    )
    return TrainingConfig(workers, backups, 0, optimizer, tensors, staleness, late)


class WatchedSlot(ParameterSlot):
    """A slot that adds up what it loses because it was late."""

    lost: np.ndarray | float = 0.0

    def _take_late(self, grad) -> None:
        if self._training.late == "drop":
            self.lost = self.lost + grad().double().reshape(-1).numpy()
        super()._take_late(grad)


class Worker:
    """One worker: slots, parameters, and the frames that are on their way to it."""

    def __init__(self, number: int, config: TrainingConfig, incarnation: int = 1, seed: int = 0) -> None:
        self.number = number
        self.config = config
        self.incarnation = incarnation
        self.slots = [WatchedSlot(tensor, config, number, EPOCH) for tensor in range(len(config.tensors))]
        generator = torch.Generator().manual_seed(seed + 100 * number)
        self.values = [torch.randn(parameter.shape, generator=generator) for parameter in config.tensors]
        self.produced = [np.zeros(parameter.spec.numel) for parameter in config.tensors]
        self.inbox: deque[tuple[Header, np.ndarray]] = deque()
        self.outbox: deque[tuple[Header, np.ndarray]] = deque()
        self.welcome: TrainingWelcome | None = None
        self.step = -1

    def join(self, groups=GROUPS) -> None:
        """Begin a connection: what was under way on the last one is lost."""
        self.inbox.clear()
        self.outbox.clear()
        self.welcome = None
        known = tuple(slot.newest for slot in self.slots)
        said = TrainingJoin(self.config, groups, self.incarnation, None if -1 in known else known).to_bytes()
        self.outbox.append((Header(FrameKind.JOIN, sender=self.number, epoch=EPOCH), np.frombuffer(said, np.uint8)))

    def take(self) -> None:
        """Take the oldest frame on its way."""
        header, body = self.inbox.popleft()
        if header.kind is FrameKind.WELCOME:
            self.welcome = TrainingWelcome.from_bytes(body.tobytes(), len(self.slots), self.config.staleness)
            for tensor, slot in enumerate(self.slots):
                if self.welcome.initialize:
                    self.outbox.append(slot.first_values(self.values[tensor]))
                slot.pushed_before(self.welcome.steps_pushed(tensor))
                self.outbox += [frame for frame in slot.unanswered() if frame[0].round >= self.welcome.versions[tensor]]
        else:
            slot = self.slots[header.tensor]
            slot.admit(header)
            slot.receive(header, body, self.welcome.steps_counted(header.tensor))

    @property
    def next_step(self) -> int:
        """The step that it can begin next, as the client has it."""
        known = [slot.newest for slot in self.slots]
        return max(min(known) if self.step < 0 else self.step, max(known) - 1 - self.config.staleness)

    @property
    def ready(self) -> bool:
        """Whether it can begin its next step."""
        oldest = max(0, self.next_step - self.config.staleness)
        return self.welcome is not None and all(slot.newest >= oldest for slot in self.slots)

    def begin(self) -> None:
        """Bring the values up to date."""
        self.step = self.next_step
        assert all(slot.newest >= max(0, self.step - self.config.staleness) for slot in self.slots), "ready"
        for slot, values in zip(self.slots, self.values):
            slot.apply(values, self.step)

    def push(self, grads: list[torch.Tensor | None]) -> None:
        for slot, grad, produced in zip(self.slots, grads, self.produced):
            if grad is not None:
                produced += grad.double().reshape(-1).numpy()
            frame = slot.push(grad, self.step)
            if frame is not None:
                self.outbox.append(frame)
        self.step += 1


class Job:
    """A server and its workers."""

    def __init__(self, config: TrainingConfig, seed: int = 0) -> None:
        self.config = config
        self.shard = ParameterShard()
        self.machine = ServerStateMachine(config.workers, EPOCH, self.shard)
        self.workers = [Worker(number, config, seed=seed) for number in range(config.workers)]
        self.random = random.Random(seed)
        self.draws = random.Random(seed)  # of gradients: the same whatever the order of frames

    def deliver(self, worker: Worker) -> None:
        """Bring a worker's oldest frame to the server, over the wire's format."""
        header, body = worker.outbox.popleft()
        header, body = parse(seal(header, body) + body.tobytes())
        self.machine.admit(worker.number, header)
        self.post(self.machine.receive(worker.number, header, body))

    def post(self, messages) -> None:
        for number, header, body in messages:
            sealed, kept = parse(seal(header, body) + body.tobytes())
            self.workers[number].inbox.append((sealed, kept))

    def settle(self) -> None:
        """Deliver all that is under way, in any order that keeps each connection's own."""
        while active := [(w, side) for w in self.workers for side in ("inbox", "outbox") if getattr(w, side)]:
            worker, side = self.random.choice(active)
            if side == "inbox":
                worker.take()
            else:
                self.deliver(worker)

    def start(self) -> None:
        for worker in self.workers:
            worker.join()
        self.settle()
        for worker in self.workers:
            worker.begin()

    def grads(self, unused: float = 0.0) -> list[torch.Tensor | None]:
        """Gradients at random; each None with the probability `unused`."""
        generator = torch.Generator().manual_seed(self.draws.randrange(1 << 30))
        found = [torch.randn(parameter.shape, generator=generator) for parameter in self.config.tensors]
        return [None if self.draws.random() < unused else grad for grad in found] if unused else found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for worker in self.workers:
                worker.begin()
                worker.push(self.grads())
            self.settle()
        for worker in self.workers:
            worker.begin()


def tell(job: Job, worker: int, groups: Groups) -> None:
    """A worker's hyperparameters, as its frame brings them."""
    body = np.frombuffer(encode_groups(groups), np.uint8)
    job.machine.receive(worker, Header(FrameKind.GROUPS, sender=worker, epoch=EPOCH), body)
