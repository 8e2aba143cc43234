"""The bulk coordinator: which queued messages travel when, decided by one node that is told of them.

1. A rank tells the coordinator, which runs beside rank 0, the name, size and destination of each message that is
   ready. It gathers for a moment what else gets ready.
2. The coordinator keeps a queue a link (a pair of a sender and a receiver). A link is due when its queue holds
   `threshold_bytes`, or its oldest message has waited for `timeout_seconds`.
3. Whenever a sender and a receiver are about to be idle, it gives them a batch: of the due links that conflict with
   none in use, the one that has waited longest; as many messages as the threshold takes, one at least. No two batches
   on their way have a sender or a receiver in common, so every message has both links for itself.
4. It tells sender and receiver, and the sender sends the batch as one message.

Metadata takes its time: on the wire (beside the queues of other connections), on its way, and on the coordinator's
processor, one message after another. It decides for the next batch while the last is on the wire, by a lead of about
its own round, so that its cost can hide.

A batch is charged generously, so that a coordinator that gains nothing here gains nothing: after its first message
none takes a frame's time of the receiver's processor, or a message's time of the wire. A sender has made the frame of
each before it knows of any batch.

Source: HiPress (SOSP 2021), section 3.2. Differences: slots are not the same for all nodes: a link begins its next
batch when it is idle. The paper does not give threshold and time-out.
"""

# Shapes: N = tasks, W = ranks.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.loop import ALONE, COORDINATED, SEND, UNBATCHED
from gradwire.simulate.tasks import Tasks
from gradwire.wire.frame import HEADER_BYTES

ENTRY_BYTES = 24
"""Of the metadata of one message: tensor, part, kind, size and destination."""


@dataclass(frozen=True)
class Bulk:
    """How messages are batched.

    Attributes:
        threshold_bytes: most bytes of a batch of several messages, and a link is due that has as many waiting.
        timeout_seconds: a message that has waited so long is due.
        coordinated: False for batches that each rank makes by itself, of what waits for one peer, and no metadata.
        report_seconds: for how long a rank gathers metadata.
        deciding_seconds: of the coordinator's processor, for each message to or from it.
    """

    threshold_bytes: float = 1 << 20
    timeout_seconds: float = 0.0
    coordinated: bool = True
    report_seconds: float = 50e-6
    deciding_seconds: float = 10e-6

    def __post_init__(self) -> None:
        times = (self.timeout_seconds, self.report_seconds, self.deciding_seconds)
        if self.threshold_bytes <= 0 or min(times) < 0:
            raise OptionError(
                f"Expected a threshold above 0 and times of at least 0, got {self}. Do: pass bytes and seconds."
            )


class Rules(NamedTuple):
    """How the loop batches: `Bulk` in its terms.

    Attributes:
        mode: UNBATCHED, ALONE or COORDINATED.
        num_ranks: W.
        threshold, timeout, report_after, deciding: as in `Bulk`.
        lead: how long before a link is idle its next batch is decided.
        latency: of a control message.
        saved_seconds: what a message that is not the first of its batch spares the receiver's processor.
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


class Messages(NamedTuple):
    """Of each task (N).

    Attributes:
        source, destination: ranks of a send.
        nbytes: of its frame.
        saved_wire: what it spares its channel where it is not the first of its batch.
        next_of: the message behind it in a queue, report or batch; -1 for none.
        known_at, turn: when it came into its queue, and in which order.
    """

    source: np.ndarray
    destination: np.ndarray
    nbytes: np.ndarray
    saved_wire: np.ndarray
    next_of: np.ndarray
    known_at: np.ndarray
    turn: np.ndarray


class Queues(NamedTuple):
    """What changes.

    Attributes:
        first, last, queued: of the queue of each link: its ends, and its bytes (W · W).
        report_first, report_last, report_size: what a rank has to report (W).
        egress_until, ingress_until: when a rank's link will be idle, as far as is planned (W).
        control_seconds, entry_seconds: of a control message and of each of its entries, on a rank's link (W).
        free_at: when the coordinator's processor is free (1).
        counts: control messages, and batches (2).
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
    counts: np.ndarray


class Coordination(NamedTuple):
    """What the loop needs."""

    rules: Rules
    messages: Messages
    queues: Queues


def unbatched() -> Coordination:
    """Every message goes when it is ready."""
    nothing = np.empty(0)
    return Coordination(Rules(UNBATCHED), _messages(nothing, nothing, nothing, nothing), _queues(nothing, nothing))


def coordination(bulk: Bulk, tasks: Tasks, nbytes: np.ndarray, cluster: Cluster, frame_seconds: float) -> Coordination:
    """The coordination of all messages of a step.

    Args:
        bulk: how.
        tasks: The tasks of the step.
        nbytes: Bytes of the frame that a task sends or receives, by task.
        cluster: the machines, a rank each.
        frame_seconds: that a frame takes of a processor, whatever its size.
    """
    ranks = cluster.ranks
    is_send = tasks.kind == SEND
    source = tasks.processor % ranks
    destination = np.zeros_like(source)
    destination[is_send] = source[tasks.deliveries[tasks.deliveries_at[:-1][is_send]]]
    links = [cluster.outer_link(rank) for rank in range(ranks)]
    header = np.array([link.header_seconds for link in links])
    message = np.array([link.message_seconds for link in links])
    pace = np.array([link.seconds_a_byte for link in links])
    control, latency = HEADER_BYTES * pace + header + message, cluster.link.latency_seconds
    lead = 2 * bulk.deciding_seconds + latency + float(control.max())
    rules = Rules(
        COORDINATED if bulk.coordinated else ALONE,
        *(ranks, bulk.threshold_bytes, bulk.timeout_seconds, bulk.report_seconds, bulk.deciding_seconds),
        *(lead if bulk.coordinated else 0.0, latency, frame_seconds),
    )
    saved_wire = header[source] + message[source] * is_send
    messages = _messages(source, destination, nbytes, saved_wire)
    return Coordination(rules, messages, _queues(control, ENTRY_BYTES * pace))


def _messages(source: np.ndarray, destination: np.ndarray, nbytes: np.ndarray, saved_wire: np.ndarray) -> Messages:
    ranks, n = (source.astype(np.int64), destination.astype(np.int64)), source.size
    return Messages(*ranks, nbytes, saved_wire, np.full(n, -1, np.int64), np.zeros(n), np.zeros(n, np.int64))


def _queues(control_seconds: np.ndarray, entry_seconds: np.ndarray) -> Queues:
    ranks = control_seconds.size
    nobody, nothing = np.full(ranks * ranks, -1, np.int64), np.zeros(ranks)
    return Queues(
        *(nobody, nobody.copy(), np.zeros(ranks * ranks)),
        *(nobody[:ranks].copy(), nobody[:ranks].copy(), np.zeros(ranks, np.int64)),
        *(nothing, nothing.copy(), control_seconds, entry_seconds, np.zeros(1), np.zeros(2, np.int64)),
    )
