"""Options of gradient synchronization that do not depend on the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gradwire.core.errors import OptionError, OptionTypeError
from gradwire.net.handshake import INTEGRITIES
from gradwire.net.liveness import STALL_TIMEOUT
from gradwire.sync.strategies.register import ServiceAddress

LONGEST = timedelta(days=20)  # poll() counts milliseconds in 32 bits


@dataclass(frozen=True)
class SyncOptions:
    """Options of `gradwire.attach` and `Synchronizer`. All ranks pass the same values, except for `dump_dir`,
    `status_interval` and `threads`.

    Attributes:
        timeout: Longest time that a rank may be silent. After that, all other ranks raise an error.
        stall_timeout: Longest time that a live rank may take to join a step, or to make a call that all ranks make;
            see `gradwire.net.liveness.STALL_TIMEOUT`. In `attach`, where ranks have no connections yet, `timeout`
            applies.
        seed: Seed of all random streams.
        dump_dir: Directory of the flight recorder's file, which is written on a failure, and of the status files for
            ``gradwire top``. None means ``GRADWIRE_DUMP_DIR``, or a directory of the user's among the system's
            temporary files.
        nodes: Placement of ranks for the strategy ``"hierarchical"``: the name of each rank's node, or the number of
            ranks per node. None asks the launcher's environment, then compares host names.
        threads: Number of threads that encode, merge and decode. None means the rank's share of the usable cores (all,
            divided by ``LOCAL_WORLD_SIZE``), less one, at least one. Ranks may have different numbers.
        server: Aggregator for the strategy ``"server"``: ``"host:port"``, a sequence of these, or a
            `gradwire.Aggregator`. None reads addresses from ``GRADWIRE_AGGREGATOR``.
        time_slots: Whether a rank sends to one peer at a time, in an order in which no two ranks send to the same peer.
            For switches with small buffers (`gradwire.net.slots`). Linux only.
        watch_norms: Interval, in steps, at which ranks compare the norms of their gradients, to find a rank with broken
            memory or code (`gradwire.sync.norm_watch`). 0 means never. Steps in which `auto` leaves
            gradients to DDP's own all-reduce are not compared.
        integrity: How frames between ranks are protected: ``"crc"``, a checksum against faults, or ``"mac"``, a tag
            that also keeps out whoever can change what the network carries. Default: ``"mac"`` if the variable
            ``GRADWIRE_JOB_KEY_FILE`` or ``GRADWIRE_JOB_KEY`` gives a job key, else ``"crc"``.
        status_interval: Time between two writes of this rank's status file. 0 means that there is none.

    Raises:
        OptionError: `timeout`, `stall_timeout` or `threads` is not positive, a time is longer than `LONGEST`,
            `watch_norms` or `status_interval` is negative, `seed` is beyond signed numbers of 64 bits, or there is no
            such `integrity`.
        OptionTypeError: A time is no `timedelta`, or a number is not an int.
    """

    timeout: timedelta = timedelta(seconds=30)
    stall_timeout: timedelta = STALL_TIMEOUT
    seed: int = 0
    dump_dir: str | Path | None = None
    nodes: int | Sequence[str | int] | None = None
    server: str | Sequence[str] | ServiceAddress | None = None
    threads: int | None = None
    time_slots: bool = False
    watch_norms: int = 0
    integrity: str | None = None
    status_interval: timedelta = timedelta(seconds=2)

    def __post_init__(self) -> None:
        for name in ("timeout", "stall_timeout", "status_interval"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise OptionTypeError(f"{name} must be a timedelta, not {value!r}. Pass timedelta(seconds=30).")
            if value > LONGEST:
                raise OptionError(f"{name} must be at most {LONGEST.days} days, but it is {value}.")
        for name in ("seed", "watch_norms", *(() if self.threads is None else ("threads",))):
            if type(getattr(self, name)) is not int:
                raise OptionTypeError(f"{name} must be an int, not {getattr(self, name)!r}.")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise OptionError(
                f"seed must be from -2**63 to 2**63 - 1, and {self.seed} is not. Pass for example seed % 2**63."
            )
        for name in ("timeout", "stall_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise OptionError(
                    f"{name} must be positive, but it is {getattr(self, name)}. Pass timedelta(seconds=30)."
                )
        if self.status_interval < timedelta(0):
            raise OptionError(
                f"status_interval must be at least 0, but it is {self.status_interval}. Pass timedelta(seconds=2), or "
                "timedelta(0) for no status files."
            )
        if self.threads is not None and self.threads < 1:
            raise OptionError(
                f"threads must be at least 1, but it is {self.threads}. Leave it out for the usual number."
            )
        if self.integrity not in (None, *INTEGRITIES):
            raise OptionError(
                f'integrity must be "crc" or "mac", not {self.integrity!r}. Leave it out for the usual one.'
            )
        if self.watch_norms < 0:
            raise OptionError(f"watch_norms must be at least 0, but it is {self.watch_norms}. Pass 16, or 0 for never.")
