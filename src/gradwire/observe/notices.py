"""Notices: messages that users see without configuring logging, about slow work and automatic decisions.

By default, Python's logging does not show messages below WARNING. A notice is logged at INFO by the logger `gradwire`.
If neither that logger nor the root logger has a handler, it is also printed to standard error. Any configuration of
logging takes precedence. `GRADWIRE_QUIET=1` turns off printing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("gradwire")


def tell(message: str) -> None:
    """Log a notice, and print it if logging is not configured. Call it on one rank only."""
    logger.info("%s", message)
    silenced = logger.disabled or logger.level > logging.INFO or logger.manager.disable >= logging.INFO
    if not logger.hasHandlers() and not silenced and os.environ.get("GRADWIRE_QUIET", "0") in ("", "0"):
        print(f"gradwire: {message}", file=sys.stderr, flush=True)


def seldom(say: Callable[[str], None], seconds: float = 2.0) -> Callable[[str], None]:
    """Limit progress messages to one per `seconds`, the first after `seconds`. Quick work then prints nothing."""
    last = time.monotonic()

    def say_seldom(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(message)

    return say_seldom
