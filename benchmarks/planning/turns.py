"""One rank of a run of `never-slower`: its methods exist together, and are timed in turns of about a second.

Other work on a machine comes and goes within seconds. It meets all methods of a run, since their turns are short and in
the opposite order every other time. `auto` has settled before the first turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

import torch.distributed as dist

from gradwire.bench import worker
from gradwire.bench.job import SegmentOutcome, TimedSteps
from gradwire.bench.rank import Rank, RunSegment
from gradwire.bench.recording import record_all
from gradwire.bench.replay import Replay
from gradwire.bench.timing import settle

TURN_SECONDS = 1.0
MIN_TURNS = 2


def runner(rank: Rank) -> RunSegment:
    """Return the function that runs a segment. The first one makes all methods, in their order, and times them."""
    segments = rank.job.segments
    recordings = record_all(rank)
    timed: list[TimedSteps] = []

    def run(index: int) -> SegmentOutcome:
        if not timed:
            rank.set_rate(None)
            replays = [Replay.begin(rank, segment, recordings[segment.bucket_mb]) for segment in segments]
            timed.extend(_in_turns(rank, replays))
        return SegmentOutcome(index, rank.rank, timed=[timed[index]])

    return run


def _in_turns(rank: Rank, replays: Sequence[Replay]) -> list[TimedSteps]:
    """Time the methods of one run at its rate."""
    (rate,) = replays[0].segment.rates
    for replay in replays:
        replay.warm_up()  # before the links are shaped
    rank.set_rate(rate)
    settled = [settle(replay) for replay in replays]
    lengths = [replay.step()[1] for replay in replays]
    counts = [rank.agree(max(1, round(TURN_SECONDS / seconds))) for seconds in lengths]
    turn = sum(count * seconds for count, seconds in zip(counts, lengths, strict=True))
    wanted = sum(replay.segment.timed_seconds for replay in replays)
    turns = rank.agree(max(MIN_TURNS, round(wanted / max(turn, len(replays) * TURN_SECONDS))))
    before = [replay.connection.costs(replay.steps) for replay in replays]
    seconds: list[list[float]] = [[] for _ in replays]
    processor = [0.0 for _ in replays]
    for number in range(turns):
        for place in range(len(replays))[:: (-1) ** number]:
            dist.barrier()
            begun = time.process_time()
            seconds[place] += [replays[place].step()[1] for _ in range(counts[place])]
            processor[place] += time.process_time() - begun
    dist.barrier()
    found = []
    for place, replay in enumerate(replays):
        spent = replay.connection.costs(replay.steps) - before[place]
        found.append(
            TimedSteps(
                rate,
                seconds[place],
                **asdict(spent),
                processor_seconds=processor[place],
                settled=settled[place][0],
                settling_seconds=settled[place][1],
            )
        )
        replay.connection.close()
    return found


if __name__ == "__main__":
    worker.main(runner)
