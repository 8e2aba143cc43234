"""Server: every rank sends its indices to a stand-alone aggregator, which looks them up, adds, and sends the sum back.

One encode a rank and none of an aggregate. The statistics of the preliminary round are reduced by the same server.
Each rank sends one payload and receives one accumulator, however many ranks there are.

Source: THC (Li et al. 2024), sections 3 and 6. Differences: a tensor's ranges (`partitions`) pass one behind the other,
and one tensor is encoded while others travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from gradwire.aggregator.codec import ServedCodec
from gradwire.aggregator.interface import Reply
from gradwire.aggregator.service import ADDRESS_VARIABLE, Aggregator, AggregatorConnection
from gradwire.compressors.base import LookupCompressor
from gradwire.core.events import Event
from gradwire.sync.codec import LossyCodec
from gradwire.sync.graph import Task
from gradwire.sync.job import Chunk, TensorJob
from gradwire.sync.strategies import Builder, Runtime, Strategy, register
from gradwire.sync.strategies.builder import message_of
from gradwire.wire.frame import FrameKind

NAME = "server"


class ServedBuilder(Builder):
    """A builder whose chunks travel by the aggregator."""

    def _make_codec(self, around: Runtime) -> LossyCodec:
        service = around.services[NAME]
        assert isinstance(self.item, TensorJob) and isinstance(service, AggregatorConnection)
        self._service = service
        self._served = ServedCodec(self.item, service, around.residuals, self.rank, self.world_size, around.seed)
        return self._served

    def ask_sum(self, part: Chunk, mine: Task) -> Task:
        """Send what `mine` encoded to the aggregator. The task ends with the reply about the sum."""
        return self._ask(
            part, mine, FrameKind.PAYLOAD, "send indices", lambda: self._served.ask_sum(part, message_of(mine))
        )

    def take(self, part: Chunk, total: Task, phase: str) -> Task:
        """Write the mean over the gradient, and keep what came too late for it."""
        item = self.item

        def run() -> None:
            num_late = self._served.take(part, total.value)
            if num_late:
                detail = {"elements": num_late}
                self._events.emit(Event("late", time.monotonic(), 0.0, item.name, item.round, detail=detail))

        return self.graph.add("decode", phase, run, [total])

    def _preliminary(self, part: Chunk, encoded: bool) -> list[Task]:
        """The preliminary round by way of the aggregator."""
        mine = self.graph.add("encode", "encode stats", lambda: self._served.stats(part))
        reply = self._ask(
            part, mine, FrameKind.STATS, "send stats", lambda: self._served.ask_stats(part, message_of(mine))
        )
        return [self.graph.add("merge", "merge stats", lambda: self._served.take_stats(part), [reply])]

    def _ask(
        self, part: Chunk, mine: Task, kind: FrameKind, phase: str, ask: Callable[[], Future[Reply] | None]
    ) -> Task:
        item = self.item
        assert isinstance(item, TensorJob)

        def run() -> Future[Reply] | None:
            start = time.monotonic()
            future = ask()
            if future is not None:
                nbytes = self._service.sent_bytes(item, part, kind, message_of(mine).body)
                self._events.emit(Event("send", start, time.monotonic() - start, item.name, item.round, nbytes))
            return future

        return self.graph.add("send", phase, run, [mine])


def build(builder: ServedBuilder) -> None:
    item = builder.item
    for part in item.parts(item.entry.partitions):
        if part.count == 0:
            continue
        mine = builder.start(part, "encode indices")
        total = builder.ask_sum(part, mine)
        builder.take(part, total, "decode mean")


register(
    Strategy(
        NAME,
        build,
        ServedBuilder,
        requires_full_tensor=True,
        carried=LookupCompressor,  # type: ignore[type-abstract]
        carried_advice=(
            'Its server looks indices up and adds: pass "thc" or "uthc", or choose a strategy between ranks, such as '
            '"scatter_reduce".'
        ),
        address=Aggregator.of,
        address_advice=(
            f'Pass server="host:port" or set {ADDRESS_VARIABLE}, and start the aggregator with '
            "gradwire serve --aggregate."
        ),
    )
)
