"""Strategy "server": ranks send indices to a stand-alone aggregator, which looks them up, adds, and returns the sum.

Each rank encodes once, and no aggregate is encoded. Each rank sends one payload and receives one accumulator, however
many ranks there are. The same server reduces the statistics of the preliminary round.

Source: THC (Li et al. 2024), sections 3 and 6. Differences: the chunks of a tensor (`partitions`) form a pipeline, and
one tensor is encoded while others travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from gradwire.aggregator.codec import ServedCodec
from gradwire.aggregator.request import Reply
from gradwire.aggregator.service import ADDRESS_VARIABLE, Aggregator, AggregatorConnection
from gradwire.compressors.base import LookupCompressor
from gradwire.core.events import Event
from gradwire.sync.codec import PayloadCodec
from gradwire.sync.graph import Task
from gradwire.sync.job import Chunk, TensorJob
from gradwire.sync.strategies import Builder, Runtime, Strategy, register
from gradwire.sync.strategies.builder import message_of
from gradwire.wire.frame import FrameKind

NAME = "server"


class ServedBuilder(Builder):
    """A builder whose chunks travel through the aggregator."""

    def _make_codec(self, runtime: Runtime) -> PayloadCodec:
        service = runtime.services[NAME]
        assert isinstance(self.job, TensorJob) and isinstance(service, AggregatorConnection)
        self._service = service
        self._served = ServedCodec(self.job, service, runtime.residuals, self.rank, self.world_size, runtime.seed)
        return self._served

    def ask_sum(self, chunk: Chunk, mine: Task) -> Task:
        """Send what `mine` encoded to the aggregator. The value of the task is the reply."""
        return self._ask(
            chunk, mine, FrameKind.PAYLOAD, "send indices", lambda: self._served.ask_sum(chunk, message_of(mine))
        )

    def take(self, chunk: Chunk, total: Task, phase: str) -> Task:
        """Write the mean over the gradient, and keep what this rank sent too late."""
        job = self.job

        def run() -> None:
            num_late = self._served.take(chunk, total.value)
            if num_late:
                detail = {"elements": num_late}
                self._events.emit(Event("late", time.monotonic(), 0.0, job.name, job.round, detail=detail))

        return self.graph.add("decode", phase, run, [total])

    def _preliminary(self, chunk: Chunk, encoded: bool) -> list[Task]:
        """Reduce the statistics through the aggregator."""
        mine = self.graph.add("encode", "encode stats", lambda: self._served.stats(chunk))
        reply = self._ask(
            chunk, mine, FrameKind.STATS, "send stats", lambda: self._served.ask_stats(chunk, message_of(mine))
        )
        return [self.graph.add("merge", "merge stats", lambda: self._served.take_stats(chunk), [reply])]

    def _ask(
        self, chunk: Chunk, mine: Task, kind: FrameKind, phase: str, ask: Callable[[], Future[Reply] | None]
    ) -> Task:
        job = self.job
        assert isinstance(job, TensorJob)

        def run() -> Future[Reply] | None:
            start = time.monotonic()
            future = ask()
            if future is not None:
                nbytes = self._service.sent_bytes(job, chunk, kind, message_of(mine).body)
                self._events.emit(Event("send", start, time.monotonic() - start, job.name, job.round, nbytes))
            return future

        return self.graph.add("send", phase, run, [mine])


def build(builder: ServedBuilder) -> None:
    job = builder.job
    for chunk in job.chunks(job.entry.partitions):
        if chunk.count == 0:
            continue
        mine = builder.start(chunk, "encode indices")
        total = builder.ask_sum(chunk, mine)
        builder.take(chunk, total, "decode mean")


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
            'Pass options=gradwire.SyncOptions(server="host:port") or set '
            f"{ADDRESS_VARIABLE}, and start the aggregator with gradwire serve --aggregate."
        ),
    )
)
