"""Options of `ParameterClient`, grouped by what they are about. `ConnectionOptions` is in `gradwire.net.client`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.compressors.base import Compressor
from gradwire.core.errors import OptionError
from gradwire.net.address import parse_addresses
from gradwire.parameter_server.session import LATE, MAX_STALENESS
from gradwire.sync.plan import Plan

Methods = str | Compressor | dict[str, str | Compressor]
"""A compressor, by name or as an instance, or a dictionary of them by parameter name pattern."""


@dataclass(frozen=True)
class JobOptions:
    """The job, and this worker's place in it.

    Attributes:
        name: Name of the job, the same as the servers'.
        worker: Id of this worker, from 0 to `workers` - 1. Default: the variable ``RANK``.
        workers: Number of workers. Default: the variable ``WORLD_SIZE``.
        backups: Number of workers that may miss a step without holding it up.
        late: What a worker does with a gradient whose step was closed without it: ``"keep"``, which adds it to the
            residual, so that it is only late; or ``"drop"``, as TensorFlow's backup workers do, so that it is lost.
            `ParameterClient.report` says how much that is.
        staleness: Number of steps that a worker may be ahead of the slowest counted one. With 0, the default, all
            workers compute each step with the same parameters.
        local_steps: Number of steps whose gradients are accumulated before they are pushed.
        seed: Seed of the random streams, the same on all workers.
    """

    name: str = "gradwire"
    worker: int | None = None
    workers: int | None = None
    backups: int = 0
    late: str = "keep"
    staleness: int = 0
    local_steps: int = 1
    seed: int = 0

    def resolve(self) -> tuple[int, int]:
        """Check all values, and return `worker` and `workers`, from the environment if they are not given.

        Raises:
            OptionError: A value is out of range, or not known.
        """
        workers = _number("workers", self.workers, "WORLD_SIZE")
        worker = _number("worker", self.worker, "RANK")
        if not 0 <= worker < workers:
            raise OptionError(f"There is no worker {worker} of {workers}. Workers are numbered from 0.")
        if not 0 <= self.backups < workers:
            raise OptionError(f"backups={self.backups} does not fit {workers} workers. Pass 0 to {workers - 1}.")
        if self.late not in LATE:
            raise OptionError(f"late={self.late!r} is not known. Pass one of {', '.join(map(repr, LATE))}.")
        if self.late == "drop" and not self.backups:
            raise OptionError(
                "late='drop' has no effect without backups: no gradient is late. Pass backups=1, or more."
            )
        if not 0 <= self.staleness <= MAX_STALENESS:
            raise OptionError(f"staleness={self.staleness} is out of range. Pass 0 to {MAX_STALENESS}.")
        if self.local_steps < 1:
            raise OptionError(f"local_steps={self.local_steps} is too small. Pass 1 to push after every step.")
        return worker, workers


@dataclass(frozen=True)
class TransferOptions:
    """How gradients and updates are encoded, and when they travel.

    Attributes:
        min_elements: Smallest tensor that is compressed, in elements. Vectors are never compressed. None for the
            default of `Plan`.
        chunk_elements: Size above which a parameter is split into chunks of rows that travel one by one, in elements.
            Only for optimizers that treat each element by itself.
        join_vectors: Whether vectors, which are sent as they are, are joined to chunks of up to `chunk_elements`
            elements. All vectors of a chunk must have gradients in the same steps. Only for optimizers that treat each
            element by itself.
        feedback: Whether residuals are kept and added to later gradients and updates. None leaves this to the
            compressor.
        overlap: If true, the backward pass pushes each gradient as soon as it is computed. If false, `step` pushes
            them all, after gradients were clipped or scaled.
        fine_grained: If true, the forward pass of a module waits only for the parameters of that module. Pass False
            for a model that reads a module's parameters before it calls the module.
    """

    min_elements: int | None = None
    chunk_elements: int = 1 << 15
    join_vectors: bool = True
    feedback: bool | None = None
    overlap: bool = True
    fine_grained: bool = True

    def plan(self, methods: Methods) -> Plan:
        """A plan of these compressors.

        Raises:
            UnknownNameError, OptionTypeError: See `Plan`.
        """
        policy = {None: None, True: "error", False: "none"}[self.feedback]
        return Plan(methods, min_elements=self.min_elements, feedback=policy)


def server_addresses(servers: str | Sequence[str] | None) -> list[tuple[str, int]]:
    """Host and port of each server; None reads the variable ``GRADWIRE_SERVERS``.

    Raises:
        OptionError: There are none, or one is not ``host:port``.
    """
    given = os.environ.get("GRADWIRE_SERVERS", "") if servers is None else servers
    addresses = parse_addresses(given)
    if not addresses:
        raise OptionError('No parameter server is known. Pass servers="host:port", or set GRADWIRE_SERVERS.')
    return addresses


def _number(name: str, value: int | None, variable: str) -> int:
    given = os.environ.get(variable) if value is None else value
    if given is None:
        raise OptionError(f"{name} is not known. Pass job=JobOptions({name}=...), or set {variable}, as torchrun does.")
    return int(given)
