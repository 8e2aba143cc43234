"""The bulk coordinator of HiPress: one node decides which queued messages travel when.

1. A rank reports the name, size and destination of each ready message to the coordinator, which runs on rank 0. It
   collects reports for a short time before it sends them.
2. The coordinator keeps one queue per link (a pair of a sender and a receiver). A link is due when its queue holds
   `threshold_bytes`, or its oldest message has waited for `timeout_seconds`.
3. Whenever a sender and a receiver are about to be idle, it grants them a batch: of the due links that conflict with
   none in use, the one that has waited longest; as many messages as the threshold takes, but at least one. No two
   batches in flight share a sender or a receiver, so every message has both links to itself.
4. It notifies sender and receiver, and the sender sends the batch as one message.

Metadata takes time: on the wire (past the queues of other connections), in latency, and on the coordinator's processor,
one message after another. The coordinator decides on the next batch while the last one is on the wire, so that its cost
can be hidden.

Batches are charged too little on purpose: a coordinator that gains nothing here gains nothing. After its first message,
a batch takes no frame's time of the receiver's processor and no message's time of the wire. A sender has made each
frame before it learns of a batch.

`Bulk.slots()` are the time slots of `gradwire.net.slots` instead: each rank sends one batch at a time to its peers in
turns, without a coordinator, metadata or savings.

Source: HiPress (SOSP 2021), section 3.2. Differences: nodes have no common time slots: a link begins its next batch
when it is idle. The paper does not give threshold and timeout.
"""

# Shapes: N = tasks, W = ranks.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.net.slots import SLOT_BYTES
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.loop import ALONE, COORDINATED, SEND, SLOTS, UNBATCHED
from gradwire.simulate.tasks import Tasks
from gradwire.wire.frame import HEADER_BYTES

ENTRY_BYTES = 24
"""Bytes of the metadata of one message: tensor, chunk, kind, size and destination."""


@dataclass(frozen=True)
class Bulk:
    """How messages are batched.

    Attributes:
        threshold_bytes: Most bytes of a batch of several messages. A link with that many bytes queued is due.
        timeout_seconds: Waiting time after which a message is due.
        coordinated: If false, each rank batches what waits for one peer by itself, without metadata.
        rotating: Whether the peers of a rank take turns as in `gradwire.net.slots`. Batches save nothing then. Pass
            coordinated=False, too.
        report_seconds: Seconds for which a rank collects metadata.
        deciding_seconds: Seconds of the coordinator's processor for each message to or from it.
    """

    threshold_bytes: float = 1 << 20
    timeout_seconds: float = 0.0
    coordinated: bool = True
    report_seconds: float = 50e-6
    deciding_seconds: float = 10e-6
    rotating: bool = False

    @classmethod
    def slots(cls) -> Bulk:
        """The time slots of `SyncOptions(time_slots=True)`."""
        return cls(SLOT_BYTES, coordinated=False, rotating=True)

    def __post_init__(self) -> None:
        if self.rotating and (self.coordinated or self.timeout_seconds):
            raise OptionError("Peers take turns only without a coordinator and a timeout. Use Bulk.slots().")
        times = (self.timeout_seconds, self.report_seconds, self.deciding_seconds)
        if self.threshold_bytes <= 0 or min(times) < 0:
            raise OptionError(
                f"{self} cannot be simulated. Pass a threshold above 0 bytes and times of at least 0 seconds."
            )


class Rules(NamedTuple):
    """`Bulk` as the event loop reads it.

    Attributes:
        mode: UNBATCHED, ALONE, SLOTS or COORDINATED.
        num_ranks: Number of ranks (W).
        threshold, timeout, report_after, deciding: As in `Bulk`.
        lead: Seconds by which the next batch of a link is decided before the link is idle.
        latency: Latency of a control message.
        saved_seconds: Seconds of the receiver's processor saved by each message of a batch but the first.
        queue, window, resend_after: As in `SimulatedLink`; a queue of 0 loses nothing.
    """

    mode: int
    num_ranks: int = 0
    threshold: float = 0.0
    timeout: float = 0.0
    report_after: float = 0.0
    deciding: float = 0.0
    lead: float = 0.0
    latency: float = 0.0
    saved_seconds: float = 0.0
    queue: float = 0.0
    window: float = 0.0
    resend_after: float = 0.0


class Messages(NamedTuple):
    """Messages, by task (N).

    Attributes:
        source, destination: Ranks of a send.
        nbytes: Bytes of its frame.
        saved_wire: Seconds of its channel saved if it is not the first of its batch.
        next_of: Next message in its queue, report or batch; -1 for none.
        known_at, turn: When it entered its queue, and its number in that order.
    """

    source: np.ndarray
    destination: np.ndarray
    nbytes: np.ndarray
    saved_wire: np.ndarray
    next_of: np.ndarray
    known_at: np.ndarray
    turn: np.ndarray


class Queues(NamedTuple):
    """What changes during a run.

    Attributes:
        first, last, queued: First and last message of each link's queue, and its bytes (W · W).
        report_first, report_last, report_size: First and last message of each rank's report, and its length (W).
        egress_until, ingress_until: When each rank's link will be idle, as far as is decided (W).
        control_seconds, entry_seconds: Seconds of a control message, and of each of its entries, on a rank's link (W).
        free_at: When the coordinator's processor is free (1).
        slot: Latest slot of each rank (W).
    """

    first: np.ndarray
    last: np.ndarray
    queued: np.ndarray
    report_first: np.ndarray
    report_last: np.ndarray
    report_size: np.ndarray
    egress_until: np.ndarray
    ingress_until: np.ndarray
    control_seconds: np.ndarray
    entry_seconds: np.ndarray
    free_at: np.ndarray
    slot: np.ndarray


class Ports(NamedTuple):
    """The switch's queues toward the receivers.

    Attributes:
        filled: Bytes in the queue of each rank (W).
        under_way, window: Number of messages of each connection on their way, and its bytes in the queue (W · W).
        stalled_until: When each connection sends again (W · W).
    """

    filled: np.ndarray
    under_way: np.ndarray
    window: np.ndarray
    stalled_until: np.ndarray


class Coordination(NamedTuple):
    """Everything that the event loop needs for batching."""

    rules: Rules
    messages: Messages
    queues: Queues
    ports: Ports


def unbatched() -> Coordination:
    """No batches and no losses: every message is sent when it is ready."""
    nothing, messages = np.empty(0), _messages(*[np.empty(0)] * 4)
    return Coordination(Rules(UNBATCHED), messages, _queues(nothing, nothing), _ports(0))


def coordination(
    bulk: Bulk | None, tasks: Tasks, nbytes: np.ndarray, cluster: Cluster, frame_seconds: float
) -> Coordination:
    """Batching of all messages of a step, and the switch's queues.

    Args:
        bulk: Options; None sends each message when it is ready.
        tasks: Tasks of the step.
        nbytes: Bytes of the frame that each task sends or receives (N).
        cluster: Machines, one rank each.
        frame_seconds: Processor seconds of a frame, whatever its size.
    """
    ranks = cluster.ranks
    is_send = tasks.kind == SEND
    source = tasks.processor % ranks
    destination = np.zeros_like(source)
    destination[is_send] = source[tasks.deliveries[tasks.deliveries_at[:-1][is_send]]]
    links = [cluster.outer_link(rank) for rank in range(ranks)]
    header = np.array([link.header_seconds for link in links])
    message = np.array([link.message_seconds for link in links])
    per_byte = np.array([link.seconds_per_byte for link in links])
    control, latency = HEADER_BYTES * per_byte + header + message, cluster.link.latency_seconds
    saved_wire = header[source] + message[source] * is_send
    rules = Rules(UNBATCHED, ranks)
    if bulk is not None:
        lead = 2 * bulk.deciding_seconds + latency + float(control.max())
        rules = Rules(
            SLOTS if bulk.rotating else COORDINATED if bulk.coordinated else ALONE,
            *(ranks, bulk.threshold_bytes, bulk.timeout_seconds, bulk.report_seconds, bulk.deciding_seconds),
            *(lead if bulk.coordinated else 0.0, latency, 0.0 if bulk.rotating else frame_seconds),
        )
        saved_wire *= not bulk.rotating
    link = cluster.link
    if link.queue_bytes is not None:
        rules = rules._replace(queue=link.queue_bytes, window=link.window_bytes, resend_after=link.resend_seconds)
    messages = _messages(source, destination, nbytes, saved_wire)
    return Coordination(rules, messages, _queues(control, ENTRY_BYTES * per_byte), _ports(ranks))


def _messages(source: np.ndarray, destination: np.ndarray, nbytes: np.ndarray, saved_wire: np.ndarray) -> Messages:
    ranks, n = (source.astype(np.int64), destination.astype(np.int64)), source.size
    return Messages(*ranks, nbytes, saved_wire, np.full(n, -1, np.int64), np.zeros(n), np.zeros(n, np.int64))


def _queues(control_seconds: np.ndarray, entry_seconds: np.ndarray) -> Queues:
    ranks = control_seconds.size
    none, nothing = np.full(ranks * ranks, -1, np.int64), np.zeros(ranks)
    return Queues(
        *(none, none.copy(), np.zeros(ranks * ranks)),
        *(none[:ranks].copy(), none[:ranks].copy(), np.zeros(ranks, np.int64)),
        *(nothing, nothing.copy(), control_seconds, entry_seconds, np.zeros(1), np.zeros(ranks, np.int64)),
    )


def _ports(ranks: int) -> Ports:
    links = ranks * ranks
    return Ports(np.zeros(ranks), np.zeros(links, np.int64), np.zeros(links), np.full(links, -1.0))
