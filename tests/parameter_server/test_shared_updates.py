"""Updates that are kept and shared by workers of different versions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwire.parameter_server.shared_updates import SharedUpdates
from gradwire.wire.frame import FrameKind, Header
from tests.parameter_server.books import assert_same
from tests.parameter_server.harness import Job, make_config


def test_a_worker_that_returns_shares_the_updates_it_has_missed():
    job = Job(make_config(((700, 10), (5,)), workers=3, backups=1), seed=4)
    job.start()
    job.train(2)
    job.post(job.machine.leave(2))
    for _ in range(5):
        for worker in job.workers[:2]:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    bodies = [body for _, body in job.machine.updates.since(0, 2)]
    assert len(bodies) == 5
    returned = job.workers[2]
    returned.join()
    job.deliver(returned)
    kinds = [[header.kind for header, _ in returned.inbox if header.tensor == tensor][-1] for tensor in range(2)]
    assert kinds == [FrameKind.DELTA, FrameKind.MODEL]  # five updates of five elements are more bytes
    received = [body for header, body in returned.inbox if header.kind is FrameKind.DELTA and header.tensor == 0]
    assert [each.tobytes() for each in received] == [each.tobytes() for each in bodies]
    job.settle()
    for worker in job.workers:
        for slot, values in zip(worker.slots, worker.values):
            slot.apply(values, slot.newest)
    assert_same(job)
    assert 2 * sum(each.nbytes for each in received) < job.shard.values(0).nbytes


@given(sizes=st.lists(st.integers(0, 40), max_size=30), max_bytes=st.integers(0, 100))
def test_kept_updates_are_consecutive_and_bounded(sizes, max_bytes):
    updates = SharedUpdates()
    for step, size in enumerate(sizes):
        updates.add((Header(FrameKind.DELTA, round=step), np.zeros(size, np.uint8)), max_bytes)
        assert updates.num_bytes(0) <= max_bytes
        for version in range(step + 1):
            found = updates.since(0, version)
            assert [header.round for header, _ in found] in ([], list(range(version, step + 1)))
            if sum(sizes[version : step + 1]) <= max_bytes:
                assert found
