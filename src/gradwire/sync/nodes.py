"""Which ranks share a node, from the user's argument or from the environments that launchers set.

Ranks of one node reach each other without the slow link. All ranks hold the same map, in the same order.
"""

# Shapes: W = ranks, M = nodes.

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

from gradwire.core.errors import OptionError

logger = logging.getLogger("gradwire")

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node, both in ascending order."""


class NodeMap:
    """The nodes of a group, determined when a strategy first asks.

    Args:
        world_size: Number of ranks.
        given: `nodes` argument of `Synchronizer`.

    Attributes:
        names: Node of each rank. None until all ranks have exchanged names, if `given` is None.

    Raises:
        OptionError: `given` does not fit the group.
    """

    def __init__(self, world_size: int, given: int | Sequence[str | int] | None) -> None:
        self.names = None if given is None else _names(given, world_size)
        self._world_size = world_size
        self._nodes: Nodes | None = None

    def __call__(self) -> Nodes:
        """Return the ranks of each node."""
        if self._nodes is None:
            assert self.names is not None, "ranks exchange names before any strategy asks"
            names = self.names
            self._nodes = grouped(names)
            sizes = ", ".join(str(len(node)) for node in self._nodes)
            logger.info("Found %d nodes of %s ranks (%s).", len(self._nodes), sizes, ", ".join(dict.fromkeys(names)))
            if len(self._nodes) == 1 and self._world_size > 1:
                logger.warning(
                    "strategy='hierarchical' compresses between nodes, but all %d ranks are on %s, so gradients travel "
                    "dense. Pass SyncOptions(nodes=...) if there are slow links between these ranks.",
                    self._world_size,
                    names[0],
                )
        return self._nodes


def current_node(environment: Mapping[str, str]) -> str:
    """Return the name of this process's node.

    It comes from torchrun's GROUP_RANK, else from RANK and LOCAL_WORLD_SIZE, else it is the host name.
    """
    if "GROUP_RANK" in environment:
        return f"node {environment['GROUP_RANK']}"
    if "RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        return f"node {int(environment['RANK']) // int(environment['LOCAL_WORLD_SIZE'])}"
    return socket.gethostname()


def grouped(names: Sequence[str]) -> Nodes:
    """Group the ranks with equal names, in the order of each node's first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def _names(given: int | Sequence[str | int], world_size: int) -> list[str]:
    """Return the name of each rank's node."""
    if isinstance(given, int):
        if given < 1:
            raise OptionError(f"A node cannot have {given} ranks. Pass nodes=8 for 8 ranks per node.")
        return [f"node {rank // given}" for rank in range(world_size)]
    if isinstance(given, str) or len(given) != world_size:
        raise OptionError(
            f"nodes={given!r} does not name the nodes of {world_size} ranks. Pass one name per rank, or the number of "
            "ranks per node."
        )
    return [str(name) for name in given]
