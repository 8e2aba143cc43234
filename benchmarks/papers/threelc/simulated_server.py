"""A parameter server and its workers in one process: every part of gradwire's but the network.

The ends of the workers (`ParameterSlot`) and of the server (`ParameterShard`) hand each other the frames that would
travel. Every step counts all workers.

Vectors travel as one tensor, as they do for `ParameterClient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gradwire.parameter_server.arguments import hyperparameters, joined_kind, parameter_config
from gradwire.parameter_server.chunks import ParameterChunk, join_vectors, split
from gradwire.parameter_server.options import TransferOptions
from gradwire.parameter_server.session import ParameterConfig, TrainingConfig
from gradwire.parameter_server.shard import ParameterShard
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.parameter_server.update import frame_header, join_update
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload

EPOCH = 1  # number of the job in its frames


@dataclass(frozen=True)
class Exchange:
    """How gradients and updates are encoded.

    Attributes:
        push: Compressor of gradients.
        pull: Compressor of updates.
        feedback: Whether residuals are kept. None leaves it to the compressors.
        chunk_elements: Size above which a parameter is split, in elements.
        join_vectors: Whether vectors travel as one tensor.
    """

    push: str
    pull: str
    feedback: bool | None = None
    chunk_elements: int = TransferOptions().chunk_elements
    join_vectors: bool = True


class SimulatedServer:
    """Trains a model with gradients of several workers.

    Args:
        model: The model, which is changed in place.
        optimizer: Optimizer of its parameters; the server runs one of the same class. It is never stepped.
        workers: Number of workers.
        exchange: How gradients and updates are encoded.
        seed: Seed of the random streams.

    Attributes:
        pushed: Bytes of the gradients of one worker in the last step.
        pulled: Bytes of the updates of the last step.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, workers: int, exchange: Exchange, seed: int
    ) -> None:
        self._optimizer, self._workers = optimizer, workers
        parameters = dict(model.named_parameters())
        transfer = TransferOptions(feedback=exchange.feedback, chunk_elements=exchange.chunk_elements)
        plans = [transfer.plan(method) for method in (exchange.push, exchange.pull)]

        def configured(chunk: ParameterChunk) -> ParameterConfig:
            return parameter_config(chunk, parameters, optimizer, *plans)

        apart = split(parameters, exchange.chunk_elements)
        self._chunks = (
            join_vectors(apart, parameters, exchange.chunk_elements, lambda chunk: joined_kind(configured(chunk)))
            if exchange.join_vectors
            else apart
        )
        tensors = tuple(configured(chunk) for chunk in self._chunks)
        self._config = TrainingConfig(workers, 0, seed, type(optimizer).__name__, tensors)
        self._shard = ParameterShard()
        self._shard.config = self._config
        # Worker 0 trains the model; the others keep their own copies, which `same` compares.
        own = {name: each.data for name, each in parameters.items()}
        copies = [{name: values.clone() for name, values in own.items()} for _ in range(workers - 1)]
        self._values = [own, *copies]
        self._slots = [
            [ParameterSlot(tensor, self._config, worker, EPOCH) for tensor in range(len(tensors))]
            for worker in range(workers)
        ]
        for tensor, chunk in enumerate(self._chunks):
            _, body = self._slots[0][tensor].first_values(chunk.of(own))
            self._shard.put(tensor, body)
            for slots in self._slots:
                slots[tensor].version = slots[tensor].newest = 0
        self._step = 0
        self.pushed = self.pulled = 0.0

    def step(self, gradients: Sequence[Iterable[torch.Tensor]]) -> None:
        """One step with the gradients of all workers, in the order of the model's parameters."""
        named = [dict(zip(self._values[0], each, strict=True)) for each in gradients]
        groups = hyperparameters(self._optimizer)
        self.pushed = self.pulled = 0.0
        for tensor, chunk in enumerate(self._chunks):
            pushes = {worker: self._push(worker, tensor, chunk.of(named[worker])) for worker in range(self._workers)}
            change = self._shard.update(tensor, self._step, pushes, groups, True)
            self._pull(tensor, chunk, change)
        self.pushed /= self._workers
        self._step += 1

    def _push(self, worker: int, tensor: int, gradient: torch.Tensor) -> Payload:
        frame = self._slots[worker][tensor].push(gradient, self._step)
        assert frame is not None, "every step is open"
        header, body = frame
        self.pushed += body.nbytes
        return Payload(body, bool(header.flags & FrameFlags.NONFINITE))

    def _pull(self, tensor: int, chunk: ParameterChunk, change: Payload | None) -> None:
        flags = FrameFlags.DROPPED if change is None else FrameFlags.NONE
        header = frame_header(self._config, tensor, EPOCH, FrameKind.DELTA, self._workers, self._step, flags)
        body = join_update(range(self._workers), self._workers, change)
        self.pulled += body.nbytes
        for slots, values in zip(self._slots, self._values, strict=True):
            slots[tensor].receive(header, body)
            own = chunk.of(values)
            slots[tensor].apply(own, self._step + 1)
            if chunk.is_joined:
                chunk.write(own, values)

    def same(self) -> bool:
        """Whether all workers hold the same bits."""
        return all(
            torch.equal(values, other[name]) for other in self._values[1:] for name, values in self._values[0].items()
        )

    def residuals(self) -> dict[str, float]:
        """Norms of what has not been sent: of gradients, root mean square over workers, and of updates."""
        left = [torch.from_numpy(slot.residual) for slots in self._slots for slot in slots if slot.residual is not None]
        behind = [
            self._shard.parameters[tensor].detach() - self._shard.replicas[tensor] for tensor in self._shard.parameters
        ]
        pushes = sum(float(each.square().sum()) for each in left) / self._workers
        return {"push": pushes**0.5, "pull": sum(float(each.square().sum()) for each in behind) ** 0.5}
