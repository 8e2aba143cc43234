"""Which ranks share a node: named by the user, or found from the launcher's environment and told to each other.

A node's ranks reach each other without the slow link. All ranks hold the same map, in the same order.
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
    """The nodes of a group, looked up when a strategy first asks.

    Args:
        world_size: ranks in the group.
        given: what `Synchronizer` takes as `nodes`.

    Attributes:
        names: the node of each rank; None until all ranks have told, if `given` is None.

    Raises:
        OptionError: `given` does not fit the group.
    """

    def __init__(self, world_size: int, given: int | Sequence[str | int] | None) -> None:
        self.names = None if given is None else _names(given, world_size)
        self._world_size = world_size
        self._nodes: Nodes | None = None

    def __call__(self) -> Nodes:
        """The ranks of each node."""
        if self._nodes is None:
            assert self.names is not None, "ranks tell before anybody asks"
            names = self.names
            self._nodes = grouped(names)
            sizes = ", ".join(str(len(node)) for node in self._nodes)
            logger.info("Found %d nodes of %s ranks (%s).", len(self._nodes), sizes, ", ".join(dict.fromkeys(names)))
            if len(self._nodes) == 1 and self._world_size > 1:
                logger.warning(
                    "Expected several nodes under strategy='hierarchical', got one, %s, of all %d ranks: gradients "
                    "travel dense. Do: pass nodes= if slow links lie between these ranks.", names[0], self._world_size
                )  # fmt: skip
        return self._nodes


def here(environment: Mapping[str, str]) -> str:
    """The name of this process's node: torchrun's number of it, else from ranks a node, else the host's name."""
    if "GROUP_RANK" in environment:
        return f"node {environment['GROUP_RANK']}"
    if "RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        return f"node {int(environment['RANK']) // int(environment['LOCAL_WORLD_SIZE'])}"
    return socket.gethostname()


def grouped(names: Sequence[str]) -> Nodes:
    """Ranks of equal names together, in the order of each node's first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def _names(given: int | Sequence[str | int], world_size: int) -> list[str]:
    """The name of each rank's node."""
    if isinstance(given, int):
        if given < 1:
            raise OptionError(f"Expected at least 1 rank a node, got nodes={given}. Do: pass the ranks a node has.")
        return [f"node {rank // given}" for rank in range(world_size)]
    if isinstance(given, str) or len(given) != world_size:
        raise OptionError(
            f"Expected the node of each of {world_size} ranks, got nodes={given!r}. Do: pass one name a rank, or the "
            "number of ranks a node."
        )
    return [str(name) for name in given]
