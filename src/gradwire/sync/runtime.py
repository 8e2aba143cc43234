"""What is the same for every job of a synchronizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradwire.core.events import EventStream
from gradwire.net.transport import Transport
from gradwire.residuals.transaction import Residuals
from gradwire.sync.nodes import Nodes


@dataclass
class Runtime:
    """What is the same for every job of a synchronizer.

    Attributes:
        transport: Transport of the frames.
        residuals: Residuals of this rank.
        events: Stream of metrics.
        seed: Seed of all random streams.
        nodes: Returns the ranks of each node; None if every rank is a node.
        services: Connections to the servers of strategies that need one, by the strategy's name.
    """

    transport: Transport
    residuals: Residuals
    events: EventStream
    seed: int
    nodes: Callable[[], Nodes] | None = None
    services: dict[str, Any] = field(default_factory=dict)
