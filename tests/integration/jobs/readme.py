"""The README's example on scikit-learn's digits, with the ends that scripts have. Started by torchrun."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from tests.integration.jobs.training import batches, loss_of, model

STEPS = 30
APART_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--detach", action="store_true", help="call handle.detach() at the end")
    parser.add_argument("--destroy", action="store_true", help="call destroy_process_group() at the end")
    parser.add_argument("--apart", action="store_true", help="ranks end seconds after each other")
    parser.add_argument("--save", type=Path, help="rank 0 evaluates, and saves the model and its accuracy here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ddp = DistributedDataParallel(model(width=512))  # one matrix of 2**18 elements, whose decoding takes a while
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = gw.attach(ddp, "threelc", optimizer=optimizer)

    for batch in itertools.islice(batches(rank, world_size, seed=rank), STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    print(handle.report())

    if options.apart:
        time.sleep(APART_SECONDS * rank / (world_size - 1))
    if options.save and rank == 0:
        images, labels = next(batches(0, 1, size=1000, seed=99))
        with torch.no_grad():
            accuracy = (ddp.module(images).argmax(1) == labels).float().mean().item()
        torch.save({"model": ddp.module.state_dict(), "accuracy": accuracy}, options.save)
    if options.detach:
        handle.detach()
    if options.destroy:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
