"""Two ranks, each an interpreter of its own: rank 0 waits in `attach` for rank 1, which does not come."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    attach = gw.attach  # imports what it needs, which may take longer than the test waits
    print("both are here", flush=True)
    if dist.get_rank() == 0:
        attach(ddp, "onebit", options=gw.SyncOptions(timeout=timedelta(minutes=10)))
    else:
        sys.stdin.read()


if __name__ == "__main__":
    main()
