"""The processes of `benchmarks.papers.thc.lab`: ranks that synchronize gradients in rounds, and the aggregator.

A round is a replayed step without computation: all gradients are ready at once, and the duration is that of
synchronization. This module runs as a rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gradwire.bench.job import Progress, SegmentOutcome
from gradwire.bench.methods import Attached
from gradwire.bench.rank import Rank, RunSegment
from gradwire.bench.recording import Recording, record
from gradwire.bench.replay import Replay
from gradwire.bench.worker import main
from gradwire.core.events import Event
from gradwire.kernels import active as kernels
from gradwire.lab.counters import interface_counters
from gradwire.lab.network import INTERFACE

PORT = 7071
WARM_UPS = 3
LEAST, MOST = 4, 30  # timed rounds
BUCKET_MB = 25.0
SERVERS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "multicast": {"udp": True, "multicast": ("239.71.87.1", 7072)},
    "xdp": {"udp": True, "xdp": INTERFACE, "xdp_mode": "generic"},
}
"""Options of `gradwire.aggregator.options.AggregationOptions`, by kind of server."""


def rounds(rank: Rank) -> RunSegment:
    """Return a function that runs segments as rounds."""
    recording = at_once(record(rank, BUCKET_MB))
    return lambda index: run(rank, index, recording)


def at_once(recording: Recording) -> Recording:
    """A recorded step without computation."""
    buckets = [replace(bucket, ready_seconds=0.0) for bucket in recording.buckets]
    return replace(recording, buckets=buckets, backward_seconds=0.0, step_seconds=0.0)


def run(rank: Rank, index: int, recording: Recording) -> SegmentOutcome:
    """Run rounds of one method at one rate. Times are sent as the phase of a progress message."""
    segment = rank.job.segments[index]
    (rate,) = segment.rates
    replay = Replay.begin(rank, segment, recording)
    for _ in range(WARM_UPS - 1):
        replay.step()
    rank.set_rate(rate)
    _, expected = replay.step()
    count = rank.agree(max(LEAST, min(MOST, round(segment.timed_seconds / expected))))
    dist.barrier()
    before = interface_counters() if rank.job.shaped else None
    with listening(replay) as spent:
        seconds = [replay.step()[1] for _ in range(count)]
    dist.barrier()  # all that was sent has arrived
    said: dict[str, Any] = {"rank": rank.rank, "seconds": seconds, "rounds": replay.steps, **spent}
    if before is not None:
        traffic = interface_counters() - before
        said |= {"sent": traffic.bytes_sent, "received": traffic.bytes_received}
    rank.say(Progress(index, json.dumps(said), count, count, rate=rate))
    rank.set_rate(None)
    replay.connection.close()
    return SegmentOutcome(index, rank.rank)


@contextmanager
def listening(replay: Replay) -> Iterator[dict[str, float]]:
    """Add up codec times of the worker, and of merges if this rank acts as a server."""
    spent = {"worker": 0.0, "server": 0.0}

    def note(event: Event) -> None:
        if event.kind in ("encode", "merge", "decode"):
            merges = event.kind == "merge" and event.detail["phase"] != "merge stats"
            spent["server" if merges else "worker"] += event.duration

    if not isinstance(replay.connection, Attached):
        yield spent
        return
    stop = replay.connection.handle.synchronizer.events.listen(note)
    yield spent
    stop()


def serve(kind: str, sessions: int, host: str, workers: int, report: str) -> None:
    """Aggregate for each method in turn. The report has one line of processor seconds for each method."""
    from gradwire.aggregator.options import AggregationOptions
    from gradwire.aggregator.process import AggregationServer

    for accumulator in (np.zeros(1024, np.uint8), np.zeros(1024, np.uint16)):  # compiled before anybody waits
        kernels.lookup_indices(np.zeros(512, np.uint8), 4, np.arange(16, dtype=np.uint32), accumulator, True)
    for _ in range(sessions):
        began = time.process_time()
        AggregationServer(AggregationOptions(workers, host, PORT, **SERVERS[kind])).run(lambda said: None)
        with Path(report).open("a") as file:
            file.write(f"{time.process_time() - began}\n")


if __name__ == "__main__":
    main(rounds)
