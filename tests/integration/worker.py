"""One rank of a job started by `launch`."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(env: dict[str, str], output: Path, job: str, parameters: dict[str, Any], result: Path) -> None:
    """Be a rank in a process that has just been forked: join the process group, run `tests.integration.jobs.<job>`,
    write down what it returns, and end.
    """
    os.environ.clear()
    os.environ.update(env)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=2)  # from `launch`, to a rank that does not end
    module, function = job.rsplit(".", 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_job = getattr(importlib.import_module(f"tests.integration.jobs.{module}"), function)
    result.write_text(json.dumps(run_job(rank, world_size, **parameters)))
    sys.stdout.flush()
    # A job whose peers were killed cannot take a process group down in good order.
    os._exit(0)
