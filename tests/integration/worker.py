"""One rank of a job started by `launch`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    job, parameters, result_path = sys.argv[1:]
    module, function = job.rsplit(".", 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = getattr(importlib.import_module(f"tests.integration.jobs.{module}"), function)
    result = run(rank, world_size, **json.loads(parameters))
    Path(result_path).write_text(json.dumps(result))
    sys.stdout.flush()
    # A job whose peers were killed cannot take a process group down in good order.
    os._exit(0)


if __name__ == "__main__":
    main()
