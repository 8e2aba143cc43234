"""Handshake: both ends of a new connection prove that they hold the job key. Without I/O.

    connector                                   acceptor
    HELLO: protocol version, nonce, 0   ->
                                        <-      CHALLENGE: integrity, nonce
    PROOF: HMAC("connector", transcript) ->
                                        <-      PROOF: HMAC("acceptor", transcript)

A connector that has lost the connection after CHALLENGE answers it on the next one. Its HELLO is that of the lost
connection, with the acceptor's nonce in place of 0, and PROOF follows at once (`gradwire.net.challenges`).

The transcript binds protocol version, integrity, group name, epoch, world size, both ranks and both nonces, so that a
proof is valid for one connection, one direction and one pair of ranks. The connector proves itself first: an
unauthenticated peer learns a nonce and nothing else. When the connector is done, so is the acceptor.

The integrity says how the frames that follow are protected: ``"crc"`` by a checksum, against faults, or ``"mac"`` by a
tag (`gradwire.wire.mac`), also against someone who can write into the TCP connection. The keys of the tags are derived
from the job key and the transcript, so that each connection and direction has its own.

Guarantees: arbitrary bytes lead to `HandshakeError` (a `FrameError`). The key shows up in no repr, message or pickle.
Proofs are compared in constant time. Does not encrypt the bytes that follow.

Source: ISO/IEC 9798-4, three-pass mutual authentication, with HMAC-SHA256 (RFC 2104). NIST SP 800-108r1 for keys
derived with HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from gradwire.core.errors import FrameError, OptionError
from gradwire.net.challenges import CHALLENGE_BYTES, Challenges
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, pack, without_seal
from gradwire.wire.mac import TAG_BYTES, FrameMac

PROTOCOL_VERSION = 4
INTEGRITIES = ("crc", "mac")
"""How the frames of a connection may be protected. All processes of a job choose the same."""
NONCE_BYTES = CHALLENGE_BYTES
PROOF_BYTES = 32
KEY_BYTES = 32
_VERSION = struct.Struct("<H")
_NO_CHALLENGE = bytes(CHALLENGE_BYTES)
_BINDING = struct.Struct("<HBQIII")


class HandshakeError(FrameError):
    """The other end is not an expected rank of this job, or does not hold its key.

    Attributes:
        answer: Frame that tells the other end what is wrong; empty if it is told nothing.
    """

    answer = b""


class JobKey:
    """A 32-byte secret that the ranks of one job share. It is never printed or pickled.

    Args:
        secret: The 32 bytes of the key.
        integrity: How it is used: one of `INTEGRITIES`.

    Attributes:
        integrity: The same.

    Raises:
        OptionError: There is no such integrity.
    """

    __slots__ = ("__secret", "integrity")

    def __init__(self, secret: bytes, integrity: str = "crc") -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"A job key has {KEY_BYTES} bytes, not {len(secret)}. Use JobKey.draw().")
        if integrity not in INTEGRITIES:
            raise OptionError(f'integrity must be "crc" or "mac", not {integrity!r}. Leave it out for the usual one.')
        self.__secret = bytes(secret)
        self.integrity = integrity

    @classmethod
    def draw(cls, integrity: str = "crc") -> JobKey:
        """Return a new random key."""
        return cls(secrets.token_bytes(KEY_BYTES), integrity)

    @property
    def prefix_bytes(self) -> int:
        """Bytes of a frame before its body."""
        return HEADER_BYTES + TAG_BYTES if self.integrity == "mac" else HEADER_BYTES

    def mac(self, *parts: bytes) -> bytes:
        """Return HMAC-SHA256 over the parts, each after its length."""
        digest = hmac.new(self.__secret, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def reveal(self) -> bytes:
        """Return the secret. Only for the store that the ranks share."""
        return self.__secret

    def __repr__(self) -> str:
        return "JobKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A job key is not pickled: the pickle would end up unprotected.")


@dataclass(frozen=True)
class GroupMember:
    """One rank of one group.

    Attributes:
        group: Name of the group. A job may have several.
        rank: This rank.
        world_size: Ranks in the group.
        epoch: 64-bit id of this incarnation of the group.
    """

    group: str
    rank: int
    world_size: int
    epoch: int


@dataclass(frozen=True)
class Challenged:
    """What a connector needs to answer a challenge on another connection: both nonces."""

    nonce: bytes
    challenge: bytes


class Handshake:
    """One end of a handshake.

    Args:
        member: This end.
        key: The job key.
        expected: Ranks that may be at the other end; exactly one for a connector.
        connect: Whether this end opened the connection.
        host: Address of the connector, for an acceptor.
        challenges: Challenges of the acceptor's listener; default: those of this connection alone.
        before: Challenge of a lost connection that a connector answers.

    Attributes:
        connects: Whether this end opened the connection.
        challenged: The challenge that has come on this connection, for a connector; None until then.
        peer: The rank at the other end; proven once `done`.
        done: Whether the other end has proven that it holds the key, and this end has nothing left to send.
    """

    def __init__(
        self, member: GroupMember, key: JobKey, expected: frozenset[int], *, connect: bool, host: str = "",
        challenges: Challenges | None = None, before: Challenged | None = None,
    ) -> None:  # fmt: skip
        assert not connect or len(expected) == 1, "a connector knows whom it calls"
        self.peer: int | None = next(iter(expected)) if connect else None
        self.done = False
        self._member = member
        self._key = key
        self._expected = expected
        self.connects = connect
        self.challenged: Challenged | None = None
        self.host = host
        self._challenges = challenges or Challenges()
        self._before = before
        # Of the acceptor: its challenge, once it has been asked for one.
        self._nonce = b"" if not connect else before.nonce if before else secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = before.challenge if before else b""
        self._due = FrameKind.HELLO if not connect else FrameKind.PROOF if before else FrameKind.CHALLENGE

    def opening(self) -> bytes:
        """Return the connector's first frame, or the first two if it answers an earlier challenge."""
        assert self.connects, "the acceptor waits"
        hello = _VERSION.pack(PROTOCOL_VERSION) + self._nonce
        if self._before is None:
            return self._frame(FrameKind.HELLO, hello + _NO_CHALLENGE)
        proof = self._frame(FrameKind.PROOF, self._proof("connector"))
        return self._frame(FrameKind.HELLO, hello + self._before.challenge) + proof

    def admit(self, header: Header) -> None:
        """Accept only the expected frame, of its exact length, from an expected rank.

        Raises:
            HandshakeError: The frame is anything else.
        """
        if self.done or header.kind is not self._due or header.length != _BODY_BYTES[self._due]:
            raise HandshakeError(
                f"Expected {self._due.name} of {_BODY_BYTES[self._due]} bytes in the handshake, got "
                f"{header.kind.name} of {header.length} bytes."
            )
        if header.epoch != self._member.epoch:
            raise HandshakeError(
                f"Expected epoch {self._member.epoch:#x}, got {header.epoch:#x}. A process of an earlier run may still "
                "be alive."
            )
        if header.count != self._member.world_size:
            raise self._other_world_size(header)
        if header.sender not in (self._expected if self.peer is None else (self.peer,)):
            raise HandshakeError(
                f"Expected a rank out of {sorted(self._expected)}, got rank {header.sender} (at rank "
                f"{self._member.rank})."
            )
        if without_seal(header) != self._header(header.kind, header.sender):
            raise HandshakeError(f"The handshake uses no other header fields: {header}.")

    def _other_world_size(self, header: Header) -> HandshakeError:
        error = HandshakeError(
            f"Expected world size {self._member.world_size}, got {header.count} (workers, and their server if they "
            "have one). Start all processes of the job with the same number of workers."
        )
        if header.kind is FrameKind.HELLO:  # refused in the same words, for its header
            error.answer = self._frame(FrameKind.CHALLENGE, bytes(_BODY_BYTES[FrameKind.CHALLENGE]))
        return error

    def receive(self, header: Header, body: np.ndarray) -> bytes:
        """Take an admitted frame and return the answer; empty if there is none.

        Raises:
            HandshakeError: The protocol version differs, or the challenge or proof is wrong.
        """
        content = body.tobytes()
        if header.kind is FrameKind.HELLO:
            return self._answer_hello(header.sender, content)
        if header.kind is FrameKind.CHALLENGE:
            self._check_integrity(content[0])
            self._peer_nonce = content[1:]
            self.challenged = Challenged(self._nonce, self._peer_nonce)
            self._due = FrameKind.PROOF
            return self._frame(FrameKind.PROOF, self._proof("connector"))
        return self._check_proof(content)

    def _answer_hello(self, sender: int, content: bytes) -> bytes:
        (version,) = _VERSION.unpack_from(content)
        if version != PROTOCOL_VERSION:
            raise HandshakeError(
                f"Expected protocol version {PROTOCOL_VERSION}, got {version} from rank {sender}. Run one "
                "gradwire version on all ranks."
            )
        self.peer = sender
        self._due = FrameKind.PROOF
        nonces = content[_VERSION.size :]
        self._peer_nonce, challenge = nonces[:NONCE_BYTES], nonces[NONCE_BYTES:]
        if challenge == _NO_CHALLENGE:
            self._nonce = self._challenges.challenge(self.host, sender, self._peer_nonce)
            return self._frame(FrameKind.CHALLENGE, bytes([self._integrity]) + self._nonce)
        if not self._challenges.knows(challenge, self.host, sender, self._peer_nonce):
            raise HandshakeError(f"Rank {sender} answers a challenge that is not valid any more, or never was.")
        self._nonce = challenge
        return b""

    @property
    def _integrity(self) -> int:
        return INTEGRITIES.index(self._key.integrity)

    def _check_integrity(self, found: int) -> None:
        if found != self._integrity:  # only a hint, not yet authenticated; the transcript binds it
            theirs = INTEGRITIES[found] if found < len(INTEGRITIES) else found
            raise HandshakeError(
                f"Rank {self.peer} has integrity={theirs!r}, and rank {self._member.rank} has {self._key.integrity!r}. "
                "Pass the same integrity at both ends, and give both the job key, or neither."
            )

    def _check_proof(self, proof: bytes) -> bytes:
        theirs, mine = ("acceptor", "connector") if self.connects else ("connector", "acceptor")
        if not hmac.compare_digest(proof, self._proof(theirs)):
            raise HandshakeError(
                f"Rank {self._member.rank} got a wrong proof of the job key from rank {self.peer}. Give both ends the "
                "same key; without one, only processes of one user on one machine share a key. A process of another "
                "job may be at that address."
            )
        if not self.connects and not self._challenges.answer(self._nonce):
            raise HandshakeError(f"Rank {self.peer} answers a challenge for the second time.")
        self.done = True
        return b"" if self.connects else self._frame(FrameKind.PROOF, self._proof(mine))

    def frame_macs(self) -> tuple[FrameMac | None, FrameMac | None]:
        """Return the keys of the tags of outgoing and of incoming frames; None and None if they have checksums."""
        assert self.done, "before, the peer's nonce is not proven"
        if self._key.integrity != "mac":
            return None, None
        mine, theirs = ("connector", "acceptor") if self.connects else ("acceptor", "connector")
        return FrameMac(self.derive(f"frames of the {mine}")), FrameMac(self.derive(f"frames of the {theirs}"))

    def derive(self, use: str) -> bytes:
        """Return 32 bytes for one use in this connection, the same at both ends.

        Nobody without the job key knows them, and of those who have it, nobody who has not seen the handshake.
        """
        return self._proof(f"key, {use}")

    def _proof(self, role: str) -> bytes:
        assert self.peer is not None, "the peer is named before anything is proven"
        mine, theirs = (self._member.rank, self._nonce), (self.peer, self._peer_nonce)
        connector, acceptor = (mine, theirs) if self.connects else (theirs, mine)
        binding = _BINDING.pack(
            PROTOCOL_VERSION, self._integrity, self._member.epoch, self._member.world_size, connector[0], acceptor[0]
        )
        group = self._member.group.encode()
        return self._key.mac(b"gradwire", role.encode(), binding, group, connector[1], acceptor[1])

    def _frame(self, kind: FrameKind, body: bytes) -> bytes:
        return pack(self._header(kind, self._member.rank), body)

    def _header(self, kind: FrameKind, sender: int) -> Header:
        return Header(kind, sender=sender, epoch=self._member.epoch, count=self._member.world_size)


_BODY_BYTES = {
    FrameKind.HELLO: _VERSION.size + NONCE_BYTES + CHALLENGE_BYTES,
    FrameKind.CHALLENGE: 1 + NONCE_BYTES,
    FrameKind.PROOF: PROOF_BYTES,
}
