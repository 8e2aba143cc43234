"""Challenges that an acceptor computes and does not store, so that a caller can answer on a later connection.

A challenge is an HMAC, under a secret of the listener, over the time and over who asked: address, rank and nonce. A
listener under a flood may drop any connection, and a caller that was dropped comes back with challenge and proof at
once. It then needs its place for no longer than the listener takes to read them.

Guarantees: a challenge is worth something for its address, rank and nonce only, for `VALID_SECONDS` to twice as long.
Each is answered once: only those that were answered with a right proof are remembered, while they are valid.

Source: RFC 6347 (DTLS), section 4.2.1, for the cookie. Differences: it is the nonce of the handshake as well, and must
therefore be answered once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

CHALLENGE_BYTES = 32
VALID_SECONDS = 30.0


class Challenges:
    """The challenges of one listener.

    Args:
        clock: Returns seconds on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._answered: dict[bytes, int] = {}  # and in which period

    def challenge(self, host: str, rank: int, nonce: bytes) -> bytes:
        """Return the 32 bytes for a rank that calls from the address `host` with this nonce."""
        return self._at(self._period(), host, rank, nonce)

    def knows(self, challenge: bytes, host: str, rank: int, nonce: bytes) -> bool:
        """Whether this is a valid challenge for that caller."""
        now = self._period()
        return any(hmac.compare_digest(challenge, self._at(at, host, rank, nonce)) for at in (now, now - 1))

    def answer(self, challenge: bytes) -> bool:
        """Note that a challenge was answered with a right proof. Returns False if it had been before."""
        now = self._period()
        if challenge in self._answered:
            return False
        self._answered = {known: at for known, at in self._answered.items() if at >= now - 1}
        self._answered[challenge] = now
        return True

    def _period(self) -> int:
        return int(self._clock() // VALID_SECONDS)

    def _at(self, period: int, host: str, rank: int, nonce: bytes) -> bytes:
        message = b"%d %d %b %b" % (period, rank, host.encode(), nonce)
        return hmac.digest(self._secret, message, hashlib.sha256)
