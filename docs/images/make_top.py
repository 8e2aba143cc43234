"""Make docs/images/top.svg: `gradwire top` beside a job of four ranks under `auto`, on hosts of the lab at 100 Mb/s.

    python docs/images/make_top.py

Needs what `gradwire lab` needs. It waits until `auto` has decided and the job has trained for a while.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 116
STEPS_AFTER_DECISION = 200
MINUTES = 10


def train() -> None:
    """Be a rank: a classifier of random images, until the job is ended."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    teacher = torch.randn(784, 10)
    torch.manual_seed(1 + dist.get_rank())
    with gw.attach(ddp, "auto", optimizer=optimizer):
        for _ in itertools.count():
            images = torch.randn(16, 784)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), (images @ teacher).argmax(1)).backward()
            optimizer.step()


def main() -> None:
    """Start the job, wait, and take the picture."""
    from gradwire.observe.jobs import jobs_of
    from gradwire.observe.status_files import read_folder

    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"GRADWIRE_DUMP_DIR": folder, "OMP_NUM_THREADS": "1", "COLUMNS": str(WIDTH)}
        gradwire = [sys.executable, "-m", "gradwire.cli"]
        lab = [*gradwire, "lab", "--hosts", "4", "--rate", "100mbit", "--quiet", "--"]
        job = subprocess.Popen([*lab, sys.executable, __file__, "--train"], env=env)
        try:
            deadline, decided = time.monotonic() + 60 * MINUTES, 0
            while True:
                first = next((found.first for found in jobs_of(read_folder(Path(folder)).files)), None)
                if first is not None and first.auto is not None and first.auto.decisions:
                    decided = first.auto.decisions[-1].step
                    if first.auto.settled and first.step > decided + STEPS_AFTER_DECISION:
                        break
                if job.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("The job has ended, or auto has not settled.")
                time.sleep(1)
            picture = Path(__file__).with_name("top.svg")
            subprocess.run([*gradwire, "top", "--folder", folder, "--svg", str(picture)], env=env, check=True)
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(60)


if __name__ == "__main__":
    train() if "--train" in sys.argv else main()
