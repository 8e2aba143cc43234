"""Processes of a benchmark on the hosts of a lab: each calls one function.

python -m benchmarks.ranks MODULE FUNCTION ARGUMENTS     # a JSON list
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from gradwire.lab.results import LabResult


def command(module: str, function: str, *arguments: Any) -> list[str]:
    """The command that calls a function in a process of its own.

    Args:
        module: Its module, for example `__spec__.name`.
        function: Its name.
        *arguments: What to call it with: plain data.
    """
    return [sys.executable, "-m", "benchmarks.ranks", module, function, json.dumps(arguments)]


def said(result: LabResult) -> list[dict[str, Any]]:
    """What host 0 printed as lines of JSON."""
    return [json.loads(line) for line in result.hosts[0].stdout.splitlines() if line.startswith("{")]


def say(**what: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    module, function, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), function)(*json.loads(arguments))
