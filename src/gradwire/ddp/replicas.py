"""Replicas of an attached module: when ranks compare them, and how they become equal again.

Under `gradwire.Aggregator.fill_after`, ranks apply different means, and nothing else makes up for it. Replicas are then
synchronized: parameters, buffers and optimizer state of one rank are copied to all ranks.

Guarantees: afterwards, these tensors have the same bits on all ranks. Nothing that is received is unpickled. Residuals
stay where they are: they are what only their rank has to send.

Source: THC (Li et al. 2024), section 6: after every epoch, workers copy the parameters of another one "when
encountering severe packet loss". Differences: all ranks copy, however little they have lost, so that replicas are
equal; buffers and optimizer state are copied, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import host, torch_private
from gradwire.core.errors import NO_TENSOR, DisagreementError, OptionError, SyncError
from gradwire.ddp.gathered import device_of
from gradwire.ddp.optimizers import Optimizers
from gradwire.sync import replica
from gradwire.sync.synchronizer import Synchronizer

logger = logging.getLogger("gradwire")


class SynchronizedReplicas(NamedTuple):
    """What `Handle.synchronize_replicas` has done.

    Attributes:
        source: Rank whose replica all ranks hold now.
        distances: How far each rank's parameters were from those of `source`: the 2-norm of the difference, relative to
            that of the parameters.
    """

    source: int
    distances: tuple[float, ...]


class Replicas:
    """The replicas of one module.

    Args:
        synchronizer: Synchronizer of the module's gradients.
        optimizers: Its optimizers.
        group: Its process group. The group's own collectives carry what is copied.
        check_every: See `gradwire.attach`.
    """

    def __init__(
        self, synchronizer: Synchronizer, optimizers: Optimizers, group: dist.ProcessGroup, check_every: int
    ) -> None:
        self._synchronizer, self._optimizers, self._group = synchronizer, optimizers, group
        self._check_every = check_every
        # If replicas may differ, a step counts when it has ended, because they may be synchronized then.
        self._counted_from = int(synchronizer.replicas_may_differ)
        self._num_filled = 0  # elements until replicas were synchronized
        self._has_warned = False

    def check_due(self, num_steps: int) -> bool:
        """Whether ranks compare their replicas in a step, counted from attach: states that they load may differ."""
        since = num_steps - self._counted_from
        return bool(self._check_every) and since > 0 and since % self._check_every == 0

    def check_if_due(self, ddp: DistributedDataParallel | None) -> None:
        """Compare the replicas of all ranks if it is due. Returns at once. Call it in each step.

        In the first step, ranks compare only which step they are at: a state may have been loaded.

        Args:
            ddp: The module. None for a rank that has joined: it takes no optimizer steps, and gets the parameters when
                all ranks have joined.
        """
        num_steps = self._synchronizer.num_steps
        due = self.check_due(num_steps)
        if not due and num_steps > 1:
            return
        compared = torch_private.learning_parameters(ddp) if due and ddp is not None else None
        on_difference = self._warn if self._synchronizer.replicas_may_differ else replica.fail
        self._synchronizer.check_replicas(compared, on_difference)

    def _warn(self, ranks: Sequence[int]) -> None:
        if self._synchronizer.rank or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "The parameters of rank %s differ from those of the other ranks, as fill_after allows, and were not "
            "synchronized for %d steps. Call handle.synchronize_replicas() after each epoch. If epochs are longer, "
            "pass their number of steps as check_every= of attach.",
            ", ".join(map(str, ranks)), self._synchronizer.num_steps - self._counted_from,
        )  # fmt: skip

    def make_equal(self, ddp: DistributedDataParallel, source: int | None) -> SynchronizedReplicas:
        """Copy the replica of one rank to all ranks; see `Handle.synchronize_replicas`."""
        if not self._optimizers:
            raise OptionError(
                "The state of the optimizer is copied with the parameters, but attach was not given the optimizer. "
                "Pass optimizer= to attach."
            )
        filled = self._synchronizer.report(with_norms=False).total.filled_elements
        counts = self._synchronizer.exchange(np.array([float(filled - self._num_filled)]))
        self._synchronizer.wait()
        chosen = int(counts.value()[:, 0].argmin()) if source is None else source
        copies = _Copies(self._group, chosen, self._synchronizer.timeout)
        distances = _copy(copies, *torch_private.replicated_tensors(ddp), self._optimizers)
        self._counted_from, self._num_filled = self._synchronizer.num_steps + 1, filled
        if self._synchronizer.rank == 0:
            logger.info("All replicas are those of rank %d. They were up to %.3g apart.", chosen, max(distances))
        return SynchronizedReplicas(chosen, distances)


def _copy(
    copies: _Copies, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
) -> tuple[float, ...]:  # fmt: skip
    """Copy all tensors, and return how far the parameters of each rank were from those that it has now."""
    states = [each for optimizer in optimizers for each in _states(optimizer)]
    copies.check([*parameters, *buffers, *(state[key] for state, key in states)])
    apart, size = 0.0, 0.0
    for parameter in parameters:
        before = parameter.detach().clone()
        copies.tensor(parameter)
        apart = math.hypot(apart, _norm(before.sub_(parameter.detach())))
        size = math.hypot(size, _norm(parameter.detach()))
    for buffer in buffers:
        copies.tensor(buffer)
    for state, key in states:
        state[key] = copies.value(state[key])
    return copies.gather(apart / size if apart else 0.0)


class _Copies:
    """Collectives that copy from one rank of a group, each within a timeout."""

    def __init__(self, group: dist.ProcessGroup, source: int, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._source = dist.get_global_rank(group, source)
        self._device = device_of(group)
        self._backends = dist.distributed_c10d.get_backend_config(group)  # by device

    def tensor(self, tensor: torch.Tensor) -> None:
        """Copy into a tensor."""
        if not tensor.numel():
            return
        device = tensor.device if tensor.device.type in self._backends else self._device
        carried = tensor.detach().to(device).clone(memory_format=torch.contiguous_format)
        self._run(dist.broadcast, carried.view(-1).view(torch.uint8), self._source)  # backends lack some types
        tensor.detach().copy_(carried)

    def value(self, value: Any) -> Any:
        """Copy a value of an optimizer's state, and return it."""
        if isinstance(value, torch.Tensor):
            self.tensor(value)
            return value
        number = host.tensor(float(value), torch.float64)
        self.tensor(number)
        return type(value)(number.item())

    def gather(self, number: float) -> tuple[float, ...]:
        """Return the numbers of all ranks."""
        mine = torch.tensor([number], dtype=torch.float64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._run(dist.all_gather, found, mine)
        return tuple(float(each) for each in found)

    def check(self, values: Iterable[Any]) -> None:
        """Raise `DisagreementError` unless all ranks have values of the same types and shapes."""
        kinds = [(each.shape, each.dtype) if isinstance(each, torch.Tensor) else type(each) for each in values]
        found = self.gather(google_crc32c.value(repr(kinds).encode()))
        odd = [rank for rank, each in enumerate(found) if each != found[0]]
        if odd:
            raise DisagreementError(
                f"Buffers or optimizer state of rank {', '.join(map(str, odd))} have other shapes or types than those "
                "of rank 0, so they cannot be copied. Call it after the same steps on all ranks."
            )

    def _run(self, collective: Callable[..., dist.Work | None], *arguments: Any) -> None:
        try:
            work = collective(*arguments, group=self._group, async_op=True)
            assert work is not None, "this rank is part of the group"
            work.wait(self._timeout)
        except RuntimeError as error:
            raise SyncError(
                f"Replicas could not be synchronized: {error} Call it on every rank, between steps.",
                tensor=NO_TENSOR,
                phase="synchronize replicas",
            ) from error


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], str]]:
    """Return where each value of an optimizer's state is, a dict and a key, in an order that all ranks share."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [optimizer.state[each] for each in parameters if each in optimizer.state]
    found = [(state, key) for state in states for key in sorted(state) if state[key] is not None]
    for state, key in found:
        if not isinstance(state[key], torch.Tensor | int | float):
            raise OptionError(
                f"The state of {type(optimizer).__name__} has {key!r}, a {type(state[key]).__name__}, but only tensors "
                "and numbers are copied. Copy parameters and state yourself, or use another optimizer."
            )
    return found


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float() if tensor.itemsize < 4 else tensor))
