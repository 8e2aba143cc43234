"""Jobs of an aggregation server: configurations, messages, contributions of workers, and expected results."""
# Shapes: W = workers, P = elements of a stream

from __future__ import annotations

import numpy as np

from gradwire.aggregator.session import (
    AggregatorJoin,
    AggregatorWelcome,
    IndexTable,
    Operation,
    SessionConfig,
    Stream,
)
from gradwire.kernels import reference
from tests.schedules.simulation import AggregationSimulation

WIDE = IndexTable(4, tuple(2 * value for value in range(16)), 16)
NARROW = IndexTable(2, (0, 3, 8, 15), 8)


def config(world_size: int = 3, **options: object) -> SessionConfig:
    """Two sums in packets of 1,024 and a maximum; the last packets are short."""
    streams = (Stream(Operation.SUM, 2500, 0), Stream(Operation.MAXIMUM, 40), Stream(Operation.SUM, 130, 1))
    return SessionConfig(world_size, (WIDE, NARROW), streams, packet_elements=1024, **options)


def small_config(world_size: int, **options: object) -> SessionConfig:
    """A sum in two packets and a maximum."""
    streams = (Stream(Operation.SUM, 1100, 0), Stream(Operation.MAXIMUM, 3))
    return SessionConfig(world_size, (NARROW if world_size <= 17 else WIDE,), streams, packet_elements=1024, **options)


JOIN = AggregatorJoin(config(), 5, 1 << 63, 0, 300.0, ("127.0.0.1", 5000))
WELCOMES = AggregatorWelcome(7), AggregatorWelcome(7, 5000), AggregatorWelcome(7, 5000, ("239.1.2.3", 6000))


def payload(job: SessionConfig, worker: int, round_: int, stream: int) -> np.ndarray | None:
    """Return a random contribution; sometimes a worker has none."""
    draw = np.random.default_rng([worker, round_ % (1 << 62), stream])
    found = job.streams[stream]
    if draw.random() < 0.1:
        return None
    if found.operation is Operation.MAXIMUM:
        return draw.standard_normal(found.size).astype(np.float32)
    return draw.integers(0, 256, job.payload_bytes(stream, found.size), np.uint8)


def expected(job: SessionConfig, round_: int, stream: int, place: slice, workers: list[int]) -> np.ndarray:
    """Return the aggregate of these workers' contributions for some elements: a model without packets."""
    found, dtype = job.streams[stream], job.result_dtype(stream)
    made = [payload(job, worker, round_, stream) for worker in workers]
    given = [each for each in made if each is not None]
    if found.operation is Operation.MAXIMUM:
        return np.max([np.full(found.size, -np.inf, np.float32), *given], axis=0)[place]
    total, table = np.zeros(found.size, dtype), job.tables[found.table]
    for each in given:
        reference.lookup_indices(each, table.bits, table.array, total, accumulate=True)
    return total[place]


def simulation(job: SessionConfig, rounds, faults, seed: int, **options) -> AggregationSimulation:
    return AggregationSimulation(
        job, lambda worker, round_, stream: payload(job, worker, round_, stream), rounds, faults, seed, **options
    )


def check(run: AggregationSimulation, rounds) -> None:
    """Check that all workers have all results, identical, and equal to the sums of the counted workers."""
    job = run.config
    for round_ in rounds:
        for stream in range(len(job.streams)):
            first = run.results[0, round_, stream]
            for worker in range(1, job.world_size):
                other = run.results[worker, round_, stream]
                assert other.values.tobytes() == first.values.tobytes()
                assert (other.reply.counted == first.reply.counted).all()
                assert (other.reply.counts == first.reply.counts).all()
                assert other.reply.flags == first.reply.flags
            for packet in range(job.num_packets(stream)):
                counted = np.flatnonzero(first.reply.counted[packet]).tolist()
                place = job.place(stream, packet)
                assert first.reply.counts[packet] == len(counted)
                assert first.values[place].tobytes() == expected(job, round_, stream, place, counted).tobytes()
                if job.needed == job.world_size:
                    gave = [w for w in range(job.world_size) if payload(job, w, round_, stream) is not None]
                    assert counted == gave
