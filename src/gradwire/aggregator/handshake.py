"""What a worker and an aggregation server say first on each connection: strict JSON, never pickle."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from typing import Any

from gradwire.aggregator.session import MAX_TERMS_BYTES, SessionConfig
from gradwire.aggregator.worker import NO_EPOCH
from gradwire.core.errors import FrameError, OptionError

MAX_JOIN_BYTES = MAX_TERMS_BYTES + 4096
MAX_WELCOME_BYTES = 4096
_MAX_NUMBER = 1 << 64
Address = tuple[str, int]


@dataclass(frozen=True)
class AggregatorJoin:
    """A worker's first words.

    Attributes:
        terms: what it expects.
        session: goes up with each start of the job; the same for all workers.
        life: drawn at random by each client.
        epoch: of the server that it has talked with before; `NO_EPOCH` for none.
        stall_seconds: how long it lets a result wait for other workers.
        address: where it takes datagrams: an IP address, never a name, and a port.
    """

    terms: SessionConfig
    session: int
    life: int
    epoch: int
    stall_seconds: float
    address: Address

    def to_bytes(self) -> bytes:
        """As JSON."""
        return _dump({**vars(self), "terms": self.terms.to_json()})

    @classmethod
    def from_bytes(cls, body: bytes) -> AggregatorJoin:
        """Raises `FrameError` where the bytes are not a worker's first words."""
        said = _load(body)
        try:
            session, life, epoch = (_number(said.pop(name)) for name in ("session", "life", "epoch"))
            terms, address = SessionConfig.from_json(said.pop("terms")), _address(said.pop("address"))
            stall = float(said.pop("stall_seconds"))
            if said or not 0 < stall < 1e9:
                raise ValueError(f"a stall of {stall} s, and {sorted(said)}")
        except FrameError:
            raise
        except Exception as error:  # whatever is wrong with a peer's bytes is that peer's error, and no more
            raise FrameError(f"Expected a worker's first words, got {error!r}. Run one gradwire version.") from error
        return cls(terms, session, life, epoch, stall, address)


@dataclass(frozen=True)
class AggregatorWelcome:
    """A server's answer.

    Attributes:
        epoch: of this life of the server.
        port: where it takes datagrams; None where packets go over this connection.
        group: the multicast group of results; None where each worker is sent its own.
    """

    epoch: int
    port: int | None = None
    group: Address | None = None

    def to_bytes(self) -> bytes:
        """As JSON."""
        return _dump(vars(self))

    @classmethod
    def from_bytes(cls, body: bytes) -> AggregatorWelcome:
        """Raises `FrameError` where the bytes are not a server's answer."""
        said = _load(body)
        try:
            epoch = _number(said.pop("epoch"))
            group, port = said.pop("group"), said.pop("port")
            found = cls(epoch, None if port is None else _port(port), None if group is None else _address(group))
            if said or epoch == NO_EPOCH:
                raise ValueError(f"epoch {epoch} and {sorted(said)}")
        except Exception as error:
            raise FrameError(f"Expected an aggregation server's answer, got {error!r}. Run one version.") from error
        return found


def check_size(terms: SessionConfig) -> None:
    """Refuse terms that are too long for a server.

    Raises:
        OptionError: they are.
    """
    size = len(_dump(terms.to_json()))
    if size > MAX_TERMS_BYTES:
        raise OptionError(
            f"Expected terms of at most {MAX_TERMS_BYTES} bytes, got {size} for {len(terms.streams)} streams. Do: send "
            "fewer, larger tensors by the aggregator, or cut them into fewer partitions."
        )


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{value!r:.40} where a number of 64 bits is due")
    return value


def _address(said: Any) -> Address:
    host, port = said
    if type(host) is not str or "%" in host:
        raise ValueError(f"{said!r:.80} where an address is due")
    return str(ipaddress.ip_address(host)), _port(port)


def _port(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 16:
        raise ValueError(f"{value!r:.40} where a port is due")
    return value


def _dump(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":"), sort_keys=True).encode()


def _load(body: bytes) -> Any:
    try:
        return json.loads(body.decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FrameError(f"Expected JSON, got {error}.") from error
