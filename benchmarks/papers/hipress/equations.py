"""HiPress's cost model as printed: equations 1 and 2 with the parameters of table 3 and section 6.1.

The study of table 7 compares the planner with it. `gradwire.planner.closed_forms` has the same equations for gradwire's
own strategies. Where both describe the same work they agree, which tests check.

Source: HiPress (SOSP 2021), section 3.3, table 3; section 6.1 for co-located servers. Differences: more partitions than
nodes. The paper groups K partitions into ⌈K/N⌉ batches and does not say more. Here, coding of one batch overlaps with
transmission of another, as with CaSync's two queues: the first batch takes its whole time, and each further one as long
as the busier of link and codec.
"""

# Shapes: K = partitions of the gradient, N = nodes, m = bytes of the gradient.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Topology = Literal["ring", "ps", "ps_colocated"]
Seconds = Callable[[float], float]
"""Seconds by bytes."""


class Counts(NamedTuple):
    """Number of consecutive sends (α), encodes (β) and decodes (γ) on the path."""

    alpha: int
    beta: int
    gamma: int


PARAMETERS: dict[Topology, Callable[[int, int], Counts]] = {
    "ring": lambda N, K: Counts(2 * (N - 1), N, N),  # table 3 and section 6.1
    "ps": lambda N, K: Counts(2 * N, K + 1, N + 1),  # table 3: servers of their own
    "ps_colocated": lambda N, K: Counts(2 * (N - 1), K, N),  # section 6.1: a server in every worker
}
"""By number of nodes and of partitions, for at most as many partitions as nodes."""


@dataclass(frozen=True)
class Hardware:
    """The notation of table 2.

    Attributes:
        send: T_send, by bytes on the wire.
        encode: T_enc, by bytes of gradient.
        decode: T_dec, by bytes of payload.
        rate: r, bytes of payload per byte of gradient.
    """

    send: Seconds
    encode: Seconds
    decode: Seconds
    rate: float


class Choice(NamedTuple):
    """An entry of table 7, with its times."""

    compress: bool
    partitions: int
    seconds: float
    dense_seconds: float


def original_seconds(hardware: Hardware, topology: Topology, m: float, K: int, N: int) -> float:
    """Equation 1, batch after batch."""
    batches, in_batch = _batches(K, N)
    return batches * PARAMETERS[topology](N, in_batch).alpha * hardware.send(m / K)


def compressed_seconds(hardware: Hardware, topology: Topology, m: float, K: int, N: int) -> float:
    """Equation 2; batches after the first hide the shorter of coding and transmission."""
    batches, in_batch = _batches(K, N)
    counts = PARAMETERS[topology](N, in_batch)
    wire = counts.alpha * hardware.send(hardware.rate * m / K)
    coding = counts.beta * hardware.encode(m / K) + counts.gamma * hardware.decode(hardware.rate * m / K)
    return wire + coding + (batches - 1) * max(wire, coding)


def choose(
    hardware: Hardware, topology: Topology, m: float, N: int, max_batches: int = 4, slack: float = 0.0
) -> Choice:
    """Whether to compress, and the smallest number of partitions within `slack` of the best."""
    counts = range(1, max_batches * N + 1)
    dense = [(original_seconds(hardware, topology, m, K, N), K) for K in counts]
    compressed = [(compressed_seconds(hardware, topology, m, K, N), K) for K in counts]
    compress = min(compressed)[0] < min(dense)[0]
    seconds, partitions = fewest(compressed if compress else dense, slack)
    return Choice(compress, partitions, seconds, min(dense)[0])


def fewest(found: Sequence[tuple[float, int]], slack: float) -> tuple[float, int]:
    """Pair (seconds, partitions) with the fewest partitions whose time is within `slack` of the best."""
    limit = min(found)[0] * (1 + slack)
    return next(pair for pair in found if pair[0] <= limit)


def _batches(K: int, N: int) -> tuple[int, int]:
    """Number of batches, and number of partitions in each."""
    batches = -(-K // N)
    return batches, -(-K // batches)
