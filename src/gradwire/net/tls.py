"""TLS on the connections between workers and servers: nobody on the way can read or change what is sent.

Both ends show a certificate that the job's authority has signed; the server's must name the host that the worker calls.
The handshake with the job key follows inside (`gradwire.net.handshake`).

Guarantees: TLS 1.3 only. Does not cover datagrams: they have tags, whose keys a TLS connection keeps secret.

Differences from `ssl.SSLSocket`: buffers in memory, so that a full or empty kernel buffer means the same as without
TLS, and frames can be dropped between any two calls.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.core.errors import OptionError

_SEND_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class TlsFiles:
    """Files of one end, in PEM format.

    Attributes:
        certificate: Certificate of this end, followed by those between it and the authority's, if any.
        key: Its private key, which only its owner can read.
        authority: Certificate of the authority that has signed the certificates of all ends.
    """

    certificate: str | Path
    key: str | Path
    authority: str | Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of one end.

        Raises:
            OptionError: A file cannot be read or does not fit the others, or others can read the private key.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            mode = Path(self.key).stat().st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise OptionError(f"Others than its owner can read the private key in {self.key}. Run chmod 600 on it.")
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            context.load_verify_locations(self.authority)
        except OSError as error:  # SSLError is one
            raise OptionError(
                f"TLS cannot use {self.certificate}, {self.key} and {self.authority}: {error}. Name a certificate, its "
                "private key without a password, and the certificate of the authority, in PEM files."
            ) from error
        return context


class TlsSocket:
    """A non-blocking TCP socket under TLS, with the methods of a socket that connections use.

    Args:
        sock: Non-blocking socket, connected or connecting.
        context: Settings of this end.
        server_name: Host that this end has called; None for an end that was called.

    Attributes:
        buffered: Whether there may be received bytes that the kernel does not report any more.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        self.buffered = False
        self._socket = sock
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived, self._leaving, server_side=server_name is None, server_hostname=server_name
        )
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()  # one thread sends while another receives, and OpenSSL takes one at a time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)  # fileno, getsockopt, shutdown, close, recv of what is thrown away

    @property
    def unsent(self) -> bool:
        """Whether bytes that were taken have not gone to the kernel."""
        return bool(self._unsent) or self._leaving.pending > 0

    def shake_hands(self) -> None:
        """Go on with TLS's handshake; return when it is done.

        Raises:
            BlockingIOError: The other end's turn has not arrived.
            OSError: The handshake has failed, or the connection is lost.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._drain()
                if not self._fetch():
                    raise ConnectionResetError("it closed the connection in TLS's handshake") from None
            except ssl.SSLError:
                self._drain()  # tells the other end why
                raise
            else:
                self._drain()
                return

    def recv_into(self, room: memoryview) -> int:
        """Fill `room` with what has arrived. See `socket.recv_into`."""
        with self._lock:
            filled = 0
            while filled < len(room):
                try:
                    filled += self._read(room[filled:])
                except ssl.SSLZeroReturnError:
                    break
                except ssl.SSLWantReadError:
                    try:
                        if not self._fetch():
                            break
                    except OSError:
                        if filled:
                            break  # the next call raises it
                        self.buffered = False
                        raise
            self.buffered = filled == len(room)
            return filled

    def send(self, data: bytes) -> int:
        """See `socket.send`."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send what was taken before, then take a limited number of bytes. See `socket.sendmsg`."""
        with self._lock:
            self._drain()
            taken = 0
            for buffer in buffers:
                part = buffer[: _SEND_BYTES - taken]
                if len(part):
                    taken += self._tls.write(part)
            with contextlib.suppress(BlockingIOError):
                self._drain()
            return taken

    def _read(self, room: memoryview) -> int:
        return int(self._tls.read(len(room), room))

    def _fetch(self) -> int:
        """Take what the kernel has; 0 at the end of the connection."""
        data = self._socket.recv(_RECEIVE_BYTES)
        self._arrived.write(data)
        return len(data)

    def _drain(self) -> None:
        """Hand everything to the kernel. Raises `BlockingIOError` if it does not take all."""
        while self.unsent:
            self._unsent = self._unsent or memoryview(self._leaving.read())
            self._unsent = self._unsent[self._socket.send(self._unsent) :]


AnySocket = socket.socket | TlsSocket
"""The socket of a connection."""


def _no_password() -> str:
    """For a key with a password, which OpenSSL would ask for at the terminal."""
    return ""
