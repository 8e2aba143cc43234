"""Cost of the first use of a compressor in a new process, with an empty and with a warm cache.

The time covers the first encode, encode with feedback, decode, and sum over ranks, without imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_CODE = "import sys; from gradwire.bench.compressors import first_use; print(first_use(sys.argv[1]))"


def run(only: str | None = None) -> Iterator[tuple[str, float, float]]:
    """For each compressor: name, seconds with an empty cache, seconds with a warm cache."""
    from gradwire.bench.compressors import matching

    for name in matching(only):
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"NUMBA_CACHE_DIR": f"{folder}/numba", "GRADWIRE_CACHE_DIR": folder}
            yield name, _seconds(name, env), _seconds(name, env)


def _seconds(name: str, env: dict[str, str]) -> float:
    found = subprocess.run(
        [sys.executable, "-c", _CODE, name], env=env, check=True, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    return float(found.stdout)
