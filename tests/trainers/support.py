"""Start the jobs of `tests.trainers.jobs` on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.examples.support import env
from tests.integration.launch import ROOT, free_port


def on_two_ranks(job: str, **parameters: Any) -> None:
    """Run a job to its end. The test fails with what was printed if a rank does."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.trainers.jobs", job, json.dumps(parameters)],
        cwd=ROOT, env=env(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
