"""The description of a strategy, and the register of all strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from gradwire.compressors.base import Compressor
from gradwire.core.errors import OptionError
from gradwire.sync.batch import codec_of
from gradwire.sync.fusion import FusionLayout
from gradwire.sync.job import TensorLayout
from gradwire.sync.nodes import Nodes
from gradwire.sync.operations import Operations
from gradwire.sync.runtime import Runtime
from gradwire.sync.strategies.builder import Builder


class Service(Protocol):
    """A rank's connection to a server that a strategy needs."""

    def check(self, tensors: Any) -> None:
        """Raise `OptionError` for tensors that the service did not learn about when this rank connected."""
        ...

    def close(self, reason: str = "") -> None:
        """Close gracefully or, with a reason, report that this rank has failed."""
        ...


class ServiceAddress(Protocol):
    """The address and options of a strategy's service. The same on all ranks."""

    @property
    def replicas_may_differ(self) -> bool:
        """Whether ranks may apply different means."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare, as plain data."""
        ...

    def connect(
        self, tensors: Any, rank: int, world_size: int, session: int, timeout: timedelta, stall_timeout: timedelta
    ) -> Service:
        """Connect this rank.

        Args:
            tensors: The `TensorRegistry` that all ranks have agreed on.
            rank: This rank.
            world_size: Number of ranks.
            session: Number of the session: the same on all ranks, and higher than in an earlier start of the job.
            timeout: Longest time without a sign of life from the service.
            stall_timeout: Longest time that a result may wait for other ranks.

        Raises:
            OptionError: Options that do not fit together.
            SyncError: The service cannot be reached.
        """
        ...


@dataclass(frozen=True)
class Strategy:
    """How tensors travel.

    Attributes:
        name: Name in plans.
        build: Function that adds the operations of one job to a builder.
        codec: Function that returns the codec of a job, with the methods that these operations call.
        has_owners: Whether each chunk has an owner, so that tensors are cut into one range per rank by default.
        requires_full_tensor: If true, ranges of a tensor cannot be submitted alone.
        sparse: If true, the strategy supports only compressors whose payloads list pairs.
        carried: Class of compressors that the strategy supports.
        carried_advice: Description of the compressors that it supports, and what to use instead.
        address: Function that makes a `ServiceAddress` from the user's ``server=`` or the environment, and returns None
            if there is neither. None for strategies that need no service.
        address_advice: What to do if there is no address.
        shows_mismatch, merges_once: See `OptimizerView`.
    """

    name: str
    build: Callable[[Builder], None]
    codec: Callable[[Any, Runtime], Any] = codec_of
    has_owners: bool = True
    requires_full_tensor: bool = False
    sparse: bool = False
    carried: type[Compressor] = Compressor  # type: ignore[type-abstract]
    carried_advice: str = ""
    address: Callable[[Any], ServiceAddress | None] | None = None
    address_advice: str = ""
    shows_mismatch: bool = False
    merges_once: bool = False

    def carries(self, compressor: Compressor) -> bool:
        """Whether the strategy supports a compressor."""
        return isinstance(compressor, self.carried) and (compressor.sparse or not self.sparse)

    def check(self, compressor: Compressor, where: str) -> None:
        """Raise `OptionError` if the strategy does not support a compressor."""
        if not self.carries(compressor):
            raise OptionError(
                f"strategy={self.name!r} does not support {compressor!r} (in {where!r}). {self.carried_advice}"
            )


STRATEGIES: dict[str, Strategy] = {}
"""All strategies by name. Modules add theirs with `register` on import."""


def register(strategy: Strategy) -> None:
    """Register a strategy under its name."""
    assert strategy.name not in STRATEGIES, f"{strategy.name} is registered twice"
    STRATEGIES[strategy.name] = strategy


def peer_strategies() -> list[str]:
    """Return the sorted names of the strategies that need no server."""
    return sorted(name for name, strategy in STRATEGIES.items() if strategy.address is None)


def operations_of(
    layout: TensorLayout | FusionLayout, rank: int, world_size: int, nodes: Callable[[], Nodes] | None = None
) -> Operations:
    """Return the operations of one job on one rank."""
    builder = Builder(layout, rank, world_size, nodes)
    STRATEGIES[layout.entry.strategy].build(builder)
    return builder.operations()
