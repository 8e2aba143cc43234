"""What a strategy is, and the register that strategies add themselves to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from gradwire.compressors.base import Compressor
from gradwire.core.errors import OptionError
from gradwire.sync.strategies.builder import Builder


class Service(Protocol):
    """A rank's connection to a process that a strategy needs besides the ranks."""

    def check(self, tensors: Any) -> None:
        """Raise `OptionError` for tensors that the service was not told of when this rank connected."""
        ...

    def close(self, reason: str = "") -> None:
        """Say goodbye; or, with a reason, that this rank gives up."""
        ...


class ServiceAddress(Protocol):
    """Where the service of a strategy is, and how it is used. The same on all ranks."""

    def describe(self) -> dict[str, Any]:
        """What ranks compare, as plain data."""
        ...

    def connect(
        self, tensors: Any, rank: int, world_size: int, session: int, timeout: timedelta, stall_timeout: timedelta
    ) -> Service:
        """Connect this rank.

        Args:
            tensors: The `TensorRegistry` that all ranks have agreed on.
            rank: This rank.
            world_size: Number of ranks.
            session: The same on all ranks, and higher than that of an earlier start of the job.
            timeout: How long the service may be silent, or not be there.
            stall_timeout: How long a result may wait for other ranks.

        Raises:
            OptionError: Options that do not fit each other.
            SyncError: No service.
        """
        ...


@dataclass(frozen=True)
class Strategy:
    """How tensors travel.

    Attributes:
        name: The name in plans.
        build: Adds the tasks of one job to a builder.
        builder: The class of builders that `build` needs.
        requires_full_tensor: If true, ranges of a tensor cannot be submitted by themselves.
        carried: The class of compressors that it carries.
        carried_advice: What `carried` is in words, and what to use in its place.
        address: Makes a `ServiceAddress` of what the user passed as ``server=``, or of the environment; None where
            there is neither. Strategies between ranks need no service and have none.
        address_advice: What to do where there is no address.
    """

    name: str
    build: Callable[[Any], None]
    builder: type[Builder] = Builder
    requires_full_tensor: bool = False
    carried: type[Compressor] = Compressor  # type: ignore[type-abstract]
    carried_advice: str = ""
    address: Callable[[Any], ServiceAddress | None] | None = None
    address_advice: str = ""

    def carries(self, compressor: Compressor) -> bool:
        """Whether tensors by a compressor can travel so."""
        return isinstance(compressor, self.carried)

    def check(self, compressor: Compressor, where: str) -> None:
        """Raise `OptionError` where tensors by a compressor cannot travel so."""
        if not self.carries(compressor):
            raise OptionError(
                f"strategy={self.name!r} cannot carry {compressor!r} (in {where!r}). {self.carried_advice}"
            )


STRATEGIES: dict[str, Strategy] = {}
"""All strategies by name. Modules add theirs with `register` when they are imported."""


def register(strategy: Strategy) -> None:
    """Make a strategy known by its name."""
    assert strategy.name not in STRATEGIES, f"{strategy.name} is registered twice"
    STRATEGIES[strategy.name] = strategy


def peer_strategies() -> list[str]:
    """Names of the strategies that need nothing besides the ranks, sorted."""
    return sorted(name for name, strategy in STRATEGIES.items() if strategy.address is None)
