"""A rank that does nothing until it is told to end, and then ends well."""

from __future__ import annotations

import signal
import sys
import time

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
