"""Be one rank of an example, and write a hash of the trained parameters: ``example result arguments``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from tests.integration.jobs.training import fingerprint


def main() -> None:
    example, result, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    sys.argv = [example, *arguments]
    model = runpy.run_path(example, run_name="example")["main"]()
    Path(result, f"{os.environ.get('RANK', '0')}.hash").write_text(fingerprint(model.parameters()))


if __name__ == "__main__":
    main()
