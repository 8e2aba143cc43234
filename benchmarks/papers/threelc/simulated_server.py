"""A parameter server and its workers in one process: every part of gradwire's but the network.

The ends of the workers (`ParameterSlot`) and of the server (`ParameterShard`) hand each other the frames that would
travel. Every step counts all workers.

Vectors are never compressed, and all of them travel as one tensor here, which gives the same values in less time. A
pull is shorter for that by one byte a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.parameter_server.arguments import hyperparameters, parameter_config
from gradwire.parameter_server.chunks import ParameterChunk, split
from gradwire.parameter_server.options import TransferOptions
from gradwire.parameter_server.session import TrainingConfig
from gradwire.parameter_server.shard import ParameterShard
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.parameter_server.update import frame_header, join_update
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload

EPOCH = 1  # number of the job in its frames
VECTORS = "vectors"  # name of the tensor that has all of them


@dataclass(frozen=True)
class Exchange:
    """How gradients and updates are encoded.

    Attributes:
        push: Compressor of gradients.
        pull: Compressor of updates.
        feedback: Whether residuals are kept. None leaves it to the compressors.
        chunk_elements: Size above which a parameter is split, in elements.
    """

    push: str
    pull: str
    feedback: bool | None = None
    chunk_elements: int = TransferOptions().chunk_elements


class SimulatedServer:
    """Trains a model with gradients of several workers.

    Args:
        model: The model, which is changed in place.
        optimizer: Optimizer of its parameters; the server runs one of the same class. It is never stepped.
        workers: Number of workers.
        exchange: How gradients and updates are encoded.
        seed: Seed of the random streams.
        join_vectors: Whether all vectors travel as one tensor.

    Attributes:
        pushed: Bytes of the gradients of one worker in the last step.
        pulled: Bytes of the updates of the last step.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, workers: int, exchange: Exchange, seed: int,
        *, join_vectors: bool = True,
    ) -> None:  # fmt: skip
        self._optimizer, self._workers = optimizer, workers
        named = dict(model.named_parameters())
        self._names = list(named)
        self._vectors = [name for name, each in named.items() if join_vectors and each.dim() < 2]
        if self._vectors:
            _join([named[name] for name in self._vectors])
        self._parameters = {name: each.data for name, each in named.items() if name not in self._vectors}
        transfer = TransferOptions(feedback=exchange.feedback, chunk_elements=exchange.chunk_elements)
        plans = [transfer.plan(method) for method in (exchange.push, exchange.pull)]
        self._chunks = split(self._parameters, exchange.chunk_elements)
        tensors = tuple(parameter_config(chunk, named[chunk.parameter], optimizer, *plans) for chunk in self._chunks)
        if self._vectors:
            first = named[self._vectors[0]]
            joined = self._parameters[VECTORS] = first.data.as_strided((_elements(first),), (1,), 0)
            config = parameter_config(ParameterChunk(self._vectors[0]), first, optimizer, *plans)
            self._chunks = [*self._chunks, ParameterChunk(VECTORS)]
            tensors = (*tensors, replace(config, name=VECTORS, shape=tuple(joined.shape)))
        self._config = TrainingConfig(workers, 0, seed, type(optimizer).__name__, tensors)
        self._shard = ParameterShard()
        self._shard.config = self._config
        # Worker 0 trains the model; the others keep their own copies, which `same` compares.
        copies = [{name: values.clone() for name, values in self._parameters.items()} for _ in range(workers - 1)]
        self._values = [self._parameters, *copies]
        self._slots = [
            [ParameterSlot(tensor, self._config, worker, EPOCH) for tensor in range(len(tensors))]
            for worker in range(workers)
        ]
        for tensor, chunk in enumerate(self._chunks):
            _, body = self._slots[0][tensor].first_values(chunk.of(self._parameters[chunk.parameter]))
            self._shard.put(tensor, body)
            for slots in self._slots:
                slots[tensor].version = slots[tensor].newest = 0
        self._step = 0
        self.pushed = self.pulled = 0.0

    def step(self, gradients: Sequence[Iterable[torch.Tensor]]) -> None:
        """One step with the gradients of all workers, in the order of the model's parameters."""
        named = [dict(zip(self._names, each, strict=True)) for each in gradients]
        if self._vectors:
            for each in named:
                each[VECTORS] = torch.cat([each[name] for name in self._vectors])
        groups = hyperparameters(self._optimizer)
        self.pushed = self.pulled = 0.0
        for tensor, chunk in enumerate(self._chunks):
            pushes = {
                worker: self._push(worker, tensor, chunk, named[worker][chunk.parameter])
                for worker in range(self._workers)
            }
            change = self._shard.update(tensor, self._step, pushes, groups, True)
            self._pull(tensor, chunk, change)
        self.pushed /= self._workers
        self._step += 1

    def _push(self, worker: int, tensor: int, chunk: ParameterChunk, gradient: torch.Tensor) -> Payload:
        frame = self._slots[worker][tensor].push(chunk.of(gradient), self._step)
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
            slots[tensor].apply(chunk.of(values[chunk.parameter]), self._step + 1)

    def same(self) -> bool:
        """Whether all workers hold the same bits."""
        return all(
            torch.equal(values, other[name]) for other in self._values[1:] for name, values in self._parameters.items()
        )

    def residuals(self) -> dict[str, float]:
        """Norms of what has not been sent: of gradients, root mean square over workers, and of updates."""
        left = [torch.from_numpy(slot.residual) for slots in self._slots for slot in slots if slot.residual is not None]
        behind = [
            self._shard.parameters[tensor].detach() - self._shard.replicas[tensor] for tensor in self._shard.parameters
        ]
        pushes = sum(float(each.square().sum()) for each in left) / self._workers
        return {"push": pushes**0.5, "pull": sum(float(each.square().sum()) for each in behind) ** 0.5}


def _join(vectors: Sequence[torch.nn.Parameter]) -> None:
    """Let vectors lie in one piece of memory, in their order."""
    flat = torch.cat([each.data for each in vectors])
    for each, part in zip(vectors, flat.split([each.numel() for each in vectors]), strict=True):
        each.data = part


def _elements(vector: torch.nn.Parameter) -> int:
    """Elements of the piece of memory that a vector lies in."""
    return vector.untyped_storage().nbytes() // vector.element_size()
