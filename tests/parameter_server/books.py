"""What a job of `harness` must have in the end: equal replicas, and every gradient applied or kept."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.parameter_server.update import push_context
from tests.parameter_server.harness import LR, Job, Worker


def assert_same(job: Job, workers=None) -> None:
    """Replicas hold the same bits, those that the server believes they have."""
    workers = job.workers if workers is None else workers
    for tensor in range(len(job.config.tensors)):
        for worker in workers:
            assert torch.equal(worker.values[tensor], job.shard.replicas[tensor]), (worker.number, tensor)


def assert_conserved(job: Job, first: list[torch.Tensor], lost: list[np.ndarray] | None = None) -> None:
    """What workers produced = what was applied + what they keep, wait for or lost + what died with a worker."""
    for tensor, before in enumerate(first):
        moved = (before.double() - job.shard.parameters[tensor].detach().double()).reshape(-1).numpy()
        applied = moved / LR * job.config.needed
        kept = sum(w.slots[tensor].residual for w in job.workers if w.slots[tensor].residual is not None)
        pending = sum(pushed_value(w, tensor, push) for w in job.workers for push in w.slots[tensor]._waiting)
        died = sum(w.slots[tensor].lost for w in job.workers) + (0.0 if lost is None else lost[tensor])
        produced = sum(w.produced[tensor] for w in job.workers)
        np.testing.assert_allclose(applied + kept + pending + died, produced, rtol=1e-3, atol=2e-3)


def pushed_value(worker: Worker, tensor: int, push) -> np.ndarray:
    """What of a worker's gradients is in a push that waits: its payload, and what that does not carry."""
    if push.payload is None or push.payload.nonfinite:
        return np.zeros(worker.produced[tensor].size) + (0.0 if push.taken is None else push.taken)
    ctx = push_context(worker.config, tensor, worker.number, push.header.round)
    sent = worker.slots[tensor].config.push_compressor.decode(push.payload, ctx).double().reshape(-1).numpy()
    return sent + (0.0 if push.left is None else push.left)
