"""A rank that trains: `top METHOD END`. It prints how it ended.

END is ``never``, or ``input``: until its input ends. Then ranks also meet outside of gradwire in each step.
"""

from __future__ import annotations

import json
import select
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.errors import SyncError
from tests.integration.jobs.training import batches, loss_of, model, wrap


def main(method: str, end: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    options = gw.SyncOptions(timeout=timedelta(seconds=180), status_interval=timedelta(milliseconds=100))
    error = None
    try:
        with gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer, options=options):
            for batch in batches(dist.get_rank(), dist.get_world_size()):
                if end == "input":
                    ended = torch.tensor(float(bool(select.select([sys.stdin], [], [], 0)[0])))
                    dist.all_reduce(ended)  # so that all ranks take as many steps
                    if ended:
                        break
                optimizer.zero_grad()
                loss_of(ddp, batch).backward()
                optimizer.step()
    except SyncError as found:
        error = type(found).__name__
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
