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
from tests.schedules.simulation import AggregationSimulation, Result

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
    """Check that all workers have all results: those that were not filled are identical, and sums of the counted."""
    for round_ in rounds:
        for stream in range(len(run.config.streams)):
            results = [run.results[worker, round_, stream] for worker in range(run.config.world_size)]
            for packet in range(run.config.num_packets(stream)):
                _check_packet(run.config, results, round_, stream, packet)
            if not any(result.reply.filled.any() for result in results):
                assert len({result.reply.flags for result in results}) == 1


def _check_packet(job: SessionConfig, results: list[Result], round_: int, stream: int, packet: int) -> None:
    place = job.place(stream, packet)
    for reply, values in ((result.reply, result.values[place]) for result in results):
        if reply.filled[packet]:
            assert job.fills(stream) and not (values.any() or reply.counts[packet] or reply.counted[packet].any())
    received = [result for result in results if not result.reply.filled[packet]]
    if not received:
        return
    assert len({result.values[place].tobytes() for result in received}) == 1
    assert len({result.reply.counted[packet].tobytes() for result in received}) == 1
    reply = received[0].reply
    counted = np.flatnonzero(reply.counted[packet]).tolist()
    assert {result.reply.counts[packet] for result in received} == {len(counted)}
    assert received[0].values[place].tobytes() == expected(job, round_, stream, place, counted).tobytes()
    if job.needed == job.world_size:
        assert counted == [w for w in range(job.world_size) if payload(job, w, round_, stream) is not None]
