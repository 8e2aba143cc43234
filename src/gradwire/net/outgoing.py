"""What every transport checks before a frame leaves."""

from __future__ import annotations

from gradwire.net.transport import Transport
from gradwire.wire.frame import DATA_KINDS, Header, describe


def check_outgoing(transport: Transport, peer: int, header: Header) -> None:
    """Check that a caller's frame may go to `peer`.

    Raises:
        ValueError: no such peer, a control frame, or a header that speaks for another rank or epoch.
    """
    if not 0 <= peer < transport.world_size or peer == transport.rank:
        raise ValueError(f"Expected another rank below {transport.world_size}, got {peer} (at rank {transport.rank}).")
    if header.kind not in DATA_KINDS:
        raise ValueError(f"Expected a data frame, got {describe(header)}. Control frames are the transport's.")
    if header.sender != transport.rank or header.epoch != transport.epoch:
        raise ValueError(
            f"Expected sender {transport.rank} and epoch {transport.epoch:#x}, got {header.sender} and "
            f"{header.epoch:#x}. Fill both in from the transport."
        )
