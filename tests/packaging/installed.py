"""Use an installed gradwire, as `make package` does with the wheel in an environment that has nothing else.

    python tests/packaging/installed.py

Needs the extra cli. Imports nothing of this repository, and runs in an empty folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

JOB = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
with gw.attach(ddp, "threelc", optimizer=optimizer) as handle:
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    ratio = handle.report().total.ratio
everyone = [None] * 2
dist.all_gather_object(everyone, ddp.module.weight.sum().item())
assert everyone[0] == everyone[1], everyone
assert ratio > 4, ratio
dist.destroy_process_group()
"""


def run(*command: str, folder: str) -> str:
    """Run a command in a folder with this interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-I", *command], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Check version, types, commands, two ranks and the doctor."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(run("-c", "import gradwire; print(gradwire.__file__)", folder=folder).strip()).parent
        if not place.is_relative_to(sys.prefix):
            sys.exit(f"gradwire is in {place}, not in {sys.prefix}: this tests sources, not an installed package.")
        for name in ("py.typed", "bench/report.html", "bench/report.css"):
            if not (place / name).is_file():
                sys.exit(f"The package lacks {name}.")
        said = subprocess.run(
            [str(Path(sys.prefix) / "bin" / "gradwire"), "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if said != f"gradwire {version('gradwire')}":
            sys.exit(f"gradwire --version says {said!r}, and the metadata {version('gradwire')!r}.")
        (Path(folder) / "job.py").write_text(JOB)
        run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py", folder=folder)
        found = json.loads(run("-m", "gradwire.cli", "doctor", "--json", folder=folder))
        if not found["can_run"]:
            sys.exit(f"The doctor says that no job can run here: {found}")
    print(f"{said} in {place}: two ranks trained, and the doctor found no problem.")


if __name__ == "__main__":
    main()
