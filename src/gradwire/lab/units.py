"""Rates, losses, delays and sizes as users write them.

Rates are bits per second in tc's units (`kbit`, `mbit`, `gbit`: powers of 1000; `kibit`, `mibit`: powers of 1024). tc's
`bps` means *bytes* per second, which readers take for bits, so it is refused with a hint.
"""

from __future__ import annotations

import re
from datetime import timedelta

from gradwire.core.errors import OptionError

_BITS = {
    "": 1,
    "bit": 1,
    "kbit": 10**3,
    "mbit": 10**6,
    "gbit": 10**9,
    "kibit": 2**10,
    "mibit": 2**20,
    "gibit": 2**30,
}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "kib": 2**10, "mib": 2**20}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")

MIN_RATE_BITS = 8_000
"""Lowest rate. At lower rates a single packet takes longer than most timeouts."""
MAX_RATE_BITS = 100_000_000_000


def parse_rate(rate: str | float | None) -> int | None:
    """Parse a rate.

    Args:
        rate: Text such as ``"100mbit"`` or ``"1.5gbit"``, bits per second, ``"none"`` or None.

    Returns:
        Bits per second, or None for a link that is not shaped.

    Raises:
        OptionError: It is not a rate, is in bytes per second, or is outside 8 kbit to 100 gbit.
    """
    text = str("none" if rate is None else rate).strip().lower()
    if text == "none":
        return None
    found = _QUANTITY.fullmatch(text)
    if found and found[2].endswith("bps"):
        prefix = found[2].removesuffix("bps")
        raise OptionError(
            f"tc reads the rate {rate!r} as bytes per second. Write '{found[1]}{prefix}bit' for bits, or eight times "
            "that if you mean bytes."
        )
    if not found or found[2] not in _BITS:
        raise OptionError(
            f"{rate!r} is not a rate. Write it like '500kbit', '100mbit', '1gbit' or 'none'. "
            f"Known units: {', '.join(unit for unit in _BITS if unit)}."
        )
    bits = round(float(found[1]) * _BITS[found[2]])
    if not MIN_RATE_BITS <= bits <= MAX_RATE_BITS:
        raise OptionError(f"The rate {rate!r} is out of range. Pass 8kbit to 100gbit, or 'none' for no shaping.")
    return bits


def format_rate(rate_bits: int | None) -> str:
    """The shortest text that `parse_rate` reads as this rate."""
    if rate_bits is None:
        return "none"
    for unit in ("gbit", "mbit", "kbit"):
        if rate_bits % _BITS[unit] == 0:
            return f"{rate_bits // _BITS[unit]}{unit}"
    return f"{rate_bits}bit"


def parse_loss(loss: str | float | None) -> float:
    """Parse a fraction of packets to drop: ``"0.1%"``, ``"0.001"``, 0.001 or None.

    Raises:
        OptionError: It is not a fraction of at least 0 and below 1.
    """
    text = str(0.0 if loss is None else loss).strip()
    number, scale = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        fraction = float(number) * scale
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction < 1.0:
        raise OptionError(f"{loss!r} is not a loss. Pass a fraction from 0 to below 1, such as '0.1%' or 0.001.")
    return fraction


def parse_delay(delay: str | timedelta | None) -> timedelta | None:
    """Parse a one-way delay: ``"5ms"``, a timedelta, ``"none"`` or None.

    Raises:
        OptionError: It is not a time from 0 to 10 s.
    """
    if delay is None or delay == "none":
        return None
    if not isinstance(delay, timedelta):
        found = _QUANTITY.fullmatch(delay.strip().lower())
        if not found or found[2] not in _SECONDS:
            raise OptionError(
                f"{delay!r} is not a delay. Write it like '500us', '5ms' or 'none'. Known units: {', '.join(_SECONDS)}."
            )
        delay = timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    if not timedelta(0) <= delay <= timedelta(seconds=10):
        raise OptionError(f"The delay {delay} is out of range. Pass 0 to 10 s, or 'none' for no delay.")
    return delay or None


def parse_queue(queue: str | int | None) -> int | None:
    """Parse the size of a queue: ``"64kib"``, a number of bytes, ``"none"`` or None.

    Raises:
        OptionError: It is not a size from 3,000 bytes, two packets, to 1 GiB.
    """
    text = str("none" if queue is None else queue).strip().lower()
    if text == "none":
        return None
    found = _QUANTITY.fullmatch(text)
    if not found or found[2] not in _BYTES:
        raise OptionError(
            f"{queue!r} is not a size. Write it like '64kib', '100kb' or 'none'. "
            f"Known units: {', '.join(unit for unit in _BYTES if unit)}."
        )
    nbytes = round(float(found[1]) * _BYTES[found[2]])
    if not 3000 <= nbytes <= 1 << 30:
        raise OptionError(f"A queue of {nbytes} bytes is out of range. Pass 3000 bytes (two packets) to 1024mib.")
    return nbytes


def seconds(duration: float | timedelta | None) -> float | None:
    """Convert a duration to seconds; None means no limit."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
