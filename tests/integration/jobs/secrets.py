"""A job whose store keeps everything that was ever written to it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

import gradwire as gw
from tests.integration.jobs.training import batches, loss_of, model, wrap


def attach_with_a_store_in_a_file(rank: int, world_size: int, path: str, key: str) -> list[int]:
    """Attach with and without a job key, and take steps. A file store only ever appends."""
    dist.destroy_process_group()
    if key:
        os.environ["GRADWIRE_JOB_KEY"] = key
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    ddp, source = wrap(model()), batches(rank, world_size)
    handle = gw.attach(ddp, gw.Plan("onebit", strategy="scatter_reduce", min_elements=0))
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp, next(source)).backward()
    prefix = handle.synchronizer.prefix_bytes
    handle.detach()
    dist.barrier()
    return [prefix]
