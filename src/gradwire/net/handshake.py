"""Who may talk: mutual proof of a job key on a fresh connection, sans-IO, both ends.

    connector                                   acceptor
    HELLO: protocol version, nonce      ->
                                        <-      CHALLENGE: nonce
    PROOF: HMAC("connector", transcript) ->
                                        <-      PROOF: HMAC("acceptor", transcript)

The transcript binds protocol version, group name, epoch, world size, both ranks and both nonces, so that a
proof is good for one connection, one direction and one pair of ranks. The connector proves itself first: a
stranger learns a nonce and nothing else. When the connector is done, the acceptor has taken it.

Guarantees: arbitrary bytes lead to `HandshakeError` (a `FrameError`); the key shows up in no repr, message or
pickle; proofs are compared in constant time. Does not protect the bytes that follow against someone who can
write into the TCP connection, and does not hide them.

Source: ISO/IEC 9798-4, three-pass mutual authentication, with HMAC-SHA256 (RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from gradwire.core.errors import FrameError
from gradwire.wire.frame import FrameKind, Header, pack, without_seal

PROTOCOL_VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32
_VERSION = struct.Struct("<H")
_BINDING = struct.Struct("<HQIII")


class HandshakeError(FrameError):
    """The other end is not the expected rank of this job, or does not hold its key."""


class JobKey:
    """A 32-byte secret that the ranks of one job share. Shows itself nowhere.

    Args:
        secret: the bytes of the key.
    """

    __slots__ = ("__secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"Expected a job key of {KEY_BYTES} bytes, got {len(secret)}. Use JobKey.draw().")
        self.__secret = bytes(secret)

    @classmethod
    def draw(cls) -> JobKey:
        """Return a new random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def mac(self, *parts: bytes) -> bytes:
        """Return HMAC-SHA256 over the parts, each with its length in front."""
        digest = hmac.new(self.__secret, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def reveal(self) -> bytes:
        """Return the secret, to hand it to the store that the ranks share; nothing else needs it."""
        return self.__secret

    def __repr__(self) -> str:
        return "JobKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A job key is not pickled: it would end up where nobody guards it.")


@dataclass(frozen=True)
class GroupMember:
    """One rank of one group.

    Attributes:
        group: name of the group; several may live in one job.
        rank: this rank.
        world_size: ranks in the group.
        epoch: 64-bit id of this incarnation of the group.
    """

    group: str
    rank: int
    world_size: int
    epoch: int


class Handshake:
    """One end of a handshake.

    Args:
        member: who this end is.
        key: the job key.
        expected: ranks that may be at the other end; exactly one makes this end the connector.
        connect: whether this end opened the connection.

    Attributes:
        connects: whether this end opened the connection.
        peer: the rank at the other end; proven once `done`.
        done: the other end has proven that it holds the key, and this end has sent what it has to.
    """

    def __init__(self, member: GroupMember, key: JobKey, expected: frozenset[int], *, connect: bool) -> None:
        assert not connect or len(expected) == 1, "a connector knows whom it calls"
        self.peer: int | None = next(iter(expected)) if connect else None
        self.done = False
        self._member = member
        self._key = key
        self._expected = expected
        self.connects = connect
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._due = FrameKind.CHALLENGE if connect else FrameKind.HELLO

    def opening(self) -> bytes:
        """Return the connector's first frame."""
        assert self.connects, "the acceptor waits"
        return self._frame(FrameKind.HELLO, _VERSION.pack(PROTOCOL_VERSION) + self._nonce)

    def admit(self, header: Header) -> None:
        """Let in only the frame that is due, from a rank that may be there, of its exact length.

        Raises:
            HandshakeError: anything else.
        """
        if self.done or header.kind is not self._due or header.length != _BODY_BYTES[self._due]:
            raise HandshakeError(
                f"Expected {self._due.name} of {_BODY_BYTES[self._due]} bytes in the handshake, got "
                f"{header.kind.name} of {header.length} bytes."
            )
        if header.epoch != self._member.epoch or header.count != self._member.world_size:
            raise HandshakeError(
                f"Expected epoch {self._member.epoch:#x} and world size {self._member.world_size}, got "
                f"{header.epoch:#x} and {header.count}. A process of an earlier start may still be running."
            )
        if header.sender not in (self._expected if self.peer is None else (self.peer,)):
            raise HandshakeError(
                f"Expected a rank out of {sorted(self._expected)}, got rank {header.sender} (at rank "
                f"{self._member.rank})."
            )

        if without_seal(header) != self._header(header.kind, header.sender):
            raise HandshakeError(f"Expected no other header fields in the handshake, got {header}.")

    def receive(self, header: Header, body: np.ndarray) -> bytes:
        """Take an admitted frame and return the frame to answer with; empty when there is none.

        Raises:
            HandshakeError: another protocol version, or a wrong proof.
        """
        content = body.tobytes()
        if header.kind is FrameKind.HELLO:
            return self._greet(header.sender, content)
        if header.kind is FrameKind.CHALLENGE:
            self._peer_nonce = content
            self._due = FrameKind.PROOF
            return self._frame(FrameKind.PROOF, self._proof("connector"))
        return self._check(content)

    def _greet(self, sender: int, content: bytes) -> bytes:
        (version,) = _VERSION.unpack_from(content)
        if version != PROTOCOL_VERSION:
            raise HandshakeError(
                f"Expected protocol version {PROTOCOL_VERSION}, got {version} from rank {sender}. Run one "
                "gradwire version on all ranks."
            )
        self.peer = sender
        self._peer_nonce = content[_VERSION.size :]
        self._due = FrameKind.PROOF
        return self._frame(FrameKind.CHALLENGE, self._nonce)

    def _check(self, proof: bytes) -> bytes:
        theirs, mine = ("acceptor", "connector") if self.connects else ("connector", "acceptor")
        if not hmac.compare_digest(proof, self._proof(theirs)):
            raise HandshakeError(
                f"Expected a proof of the job key from rank {self.peer}, got another (at rank "
                f"{self._member.rank}). Something that is not of this job answers at that address."
            )
        self.done = True
        return b"" if self.connects else self._frame(FrameKind.PROOF, self._proof(mine))

    def _proof(self, role: str) -> bytes:
        assert self.peer is not None, "the peer is named before anything is proven"
        mine, theirs = (self._member.rank, self._nonce), (self.peer, self._peer_nonce)
        connector, acceptor = (mine, theirs) if self.connects else (theirs, mine)
        binding = _BINDING.pack(
            PROTOCOL_VERSION, self._member.epoch, self._member.world_size, connector[0], acceptor[0]
        )
        group = self._member.group.encode()
        return self._key.mac(b"gradwire", role.encode(), binding, group, connector[1], acceptor[1])

    def _frame(self, kind: FrameKind, body: bytes) -> bytes:
        return pack(self._header(kind, self._member.rank), body)

    def _header(self, kind: FrameKind, sender: int) -> Header:
        return Header(kind, sender=sender, epoch=self._member.epoch, count=self._member.world_size)


_BODY_BYTES = {
    FrameKind.HELLO: _VERSION.size + NONCE_BYTES,
    FrameKind.CHALLENGE: NONCE_BYTES,
    FrameKind.PROOF: PROOF_BYTES,
}
