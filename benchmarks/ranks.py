"""Processes of a benchmark on the hosts of a lab. Each calls one function.

python -m benchmarks.ranks MODULE FUNCTION ARGUMENTS     # a JSON list
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from gradwire.lab.results import LabResult


def command(module: str, function: str, *arguments: Any) -> list[str]:
    """The command that calls a function in a new process.

    Args:
        module: Module of the function, for example `__spec__.name`.
        function: Name of the function.
        *arguments: Arguments, plain data.
    """
    return [sys.executable, "-m", "benchmarks.ranks", module, function, json.dumps(arguments)]


def said(result: LabResult) -> list[dict[str, Any]]:
    """The lines of JSON printed by host 0."""
    return [json.loads(line) for line in result.hosts[0].stdout.splitlines() if line.startswith("{")]


def say(**what: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    module, function, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), function)(*json.loads(arguments))
