"""What users are told without having asked for a log: what takes long, and what was decided for them.

Python's logging shows nobody what is below WARNING until someone configures it. A notice is logged at INFO by the
logger `gradwire`; where that logger has no handler, its own or the root's, it goes to standard error. Whoever
configures logging, in whatever way, decides alone. `GRADWIRE_QUIET=1` keeps notices to the log.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("gradwire")


def tell(message: str) -> None:
    """Log a notice, or print it where logging is not configured. Call it on one rank only."""
    logger.info("%s", message)
    silenced = logger.disabled or logger.level > logging.INFO or logger.manager.disable >= logging.INFO
    if not logger.hasHandlers() and not silenced and os.environ.get("GRADWIRE_QUIET", "0") in ("", "0"):
        print(f"gradwire: {message}", file=sys.stderr, flush=True)


def seldom(say: Callable[[str], None], seconds: float = 2.0) -> Callable[[str], None]:
    """Pass on a message only when the one before, or this call, was so long ago: signs of life of what may be quick."""
    last = time.monotonic()

    def say_seldom(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(message)

    return say_seldom
