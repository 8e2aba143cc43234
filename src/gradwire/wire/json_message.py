"""Messages that workers and servers agree by, as JSON of bounded depth. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

from gradwire.core.errors import FrameError

MAX_DEPTH = 8


def dump(data: Any) -> bytes:
    """Return plain values as JSON."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def load(body: bytes) -> Any:
    """Read untrusted bytes.

    Raises:
        FrameError: They are not JSON, or nested too deeply.
    """
    try:
        data = json.loads(body.decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FrameError(f"Not JSON: {error}.") from error
    level = [data]
    for _ in range(MAX_DEPTH):
        containers = [
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
        ]
        level = [value for values in containers for value in values]
    if level:
        raise FrameError(f"JSON of more than {MAX_DEPTH} levels is refused.")
    return data
