"""What a rank sees of aggregation: it submits its part of a stream for a round and gets a future of the result.

`gradwire.aggregator.client.AggregationClient` is the one over a network.
"""
# Shapes: W = workers, P = elements of a stream, Q = its packets

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from gradwire.aggregator.session import SessionConfig
from gradwire.wire.frame import FrameFlags


@dataclass(frozen=True, eq=False)
class Reply:
    """Who is in a result. The same on all workers, bit for bit, as the result is.

    Attributes:
        counts: int64[Q], how many contributions each packet is the sum of; decoding divides by it.
        counted: bool[Q, W], whose they are. A worker that has submitted and was not counted keeps its gradient.
        flags: of all that were heard, joined.
        packet_elements: elements in a packet, but for the last.
    """

    counts: np.ndarray
    counted: np.ndarray
    flags: FrameFlags
    packet_elements: int

    def counts_of_blocks(self, block: int, num_blocks: int) -> np.ndarray:
        """The counts by block of the stream: int64[num_blocks], as `Homomorphic.finalize_blocks` takes them.

        Raises:
            ValueError: packets are not whole blocks, and not all counts are the same.
        """
        return self._by_block(self.counts, block, num_blocks)

    def counted_blocks(self, worker: int, block: int, num_blocks: int) -> np.ndarray:
        """Which blocks hold the contribution of a worker: bool[num_blocks]."""
        return self._by_block(self.counted[:, worker], block, num_blocks)

    def _by_block(self, values: np.ndarray, block: int, num_blocks: int) -> np.ndarray:
        if self.packet_elements % block == 0:
            return np.repeat(values, self.packet_elements // block)[:num_blocks]
        if (values != values[0]).any():
            raise ValueError(
                f"Expected packets of whole blocks where not all workers are counted, got packets of "
                f"{self.packet_elements} elements and blocks of {block}. Do: choose packet_elements as a multiple."
            )
        return np.full(num_blocks, values[0], values.dtype)


class Aggregation(ABC):
    """A rank's access to an aggregation server. Any thread may submit.

    Attributes:
        terms: what was agreed.
        rank: of this worker.
    """

    terms: SessionConfig
    rank: int

    @abstractmethod
    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        """Contribute to a stream and ask for what all contributions make.

        Every worker submits the same streams in the same rounds, in any order; rounds of a stream go up, and one is
        submitted only when the one before is done.

        Args:
            round_: of the synchronization; below 2^64 − 1.
            stream: its place in the terms.
            payload: uint8, packed indices; or float32[P] for a maximum. None where this worker has nothing to add
                (it did not use the parameter, or its gradient is not finite): it is heard, and not counted. Neither
                changed nor reused until the future of the stream's next round is done, or this is closed.
            out: lanes uint8, uint16 or uint32[P] as the table says, or float32[P] for a maximum. Belongs to this
                until the future is done. Zero where nobody has contributed (−infinity of a maximum).
            flags: told to all workers, joined over those heard.

        Returns:
            A future that is done on a thread of this: callbacks must be short and not wait.

        Raises:
            ValueError: arguments do not fit the terms, or a round is submitted again or too early.
            SyncError: this has failed or was closed.

        On failure: all futures get one and the same `SyncError` (`PeerTimeoutError` where the server or a worker was
        silent too long), and so does every later call; a new client in a new session is needed then.
        """

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Say goodbye; or, with a reason, make the job of all workers fail with it. Idempotent."""
