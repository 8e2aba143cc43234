"""Traces: what each rank did and when, as Chrome trace JSON for ui.perfetto.dev and chrome://tracing.

One file per rank. Files of several ranks can be loaded together, because they use wall-clock time. Each rank is a
process with these rows:

- ``codec``: encodes, merges and decodes. Reductions of preliminary rounds are merges.
- ``send``: handing frames to the transport.
- ``recv from rank P``: received frames. Each starts when the frame before it arrived or when the rank began to wait for
  it, whichever is later. On a busy link, that is the transfer time.
- ``wait``: from the end of a backward pass until its gradients are averaged.
- ``tensor NAME``: from submission to the mean.

Guarantees: events of a row never overlap. Memory does not grow, because events are written as they come. A file of a
killed process still loads, except for its last lines. A file that cannot be written ends its trace with a warning. A
trace does not show when bytes left the host.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.core.events import Event, EventStream
from gradwire.core.threads import END_SECONDS

logger = logging.getLogger("gradwire")
_BUFFER_BYTES = 1 << 16
_CODEC = ("encode", "merge", "decode")


class Trace:
    """Writes the events of a stream to a file until `close`. A context manager.

    Args:
        events: Event stream.
        path: File. ``{rank}`` in it stands for the rank; without it, the rank is inserted before the suffix, which is
            ``.json`` if there is none.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        path: File of this rank.
    """

    def __init__(self, events: EventStream, path: str | Path, rank: int, world_size: int) -> None:
        self.path = path_of(path, rank, ".json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._offset = time.time() - time.monotonic()
        self._lock = threading.RLock()
        self._ends: dict[str, int] = {}  # by row: end of its latest event, in microseconds
        self._rows: dict[str, int] = {}
        self._process = os.getpid()
        self._file = self.path.open("w", buffering=_BUFFER_BYTES)
        self._file.write("[\n")
        self._metadata("process_name", name=f"rank {rank} of {world_size}", comma=False)
        self._metadata("process_sort_index", sort_index=rank)
        self._stop = events.listen(self._on_event)

    def close(self) -> None:
        """End the trace and complete its file. Idempotent. A forked child leaves it to its parent."""
        if os.getpid() != self._process:
            return
        self._stop()
        if not self._lock.acquire(timeout=END_SECONDS):
            logger.warning("The trace %s is left as it is: its disk has not answered for %g s.", self.path, END_SECONDS)
            return
        try:
            with self._writing():
                if not self._file.closed:
                    self._file.write("\n]\n")
                    self._file.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- events ----------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        with self._writing():
            if self._file.closed:
                return
            if event.kind in _CODEC:
                self._complete(event, "codec", event.detail.get("phase", event.kind))
            elif event.kind == "send":
                self._complete(event, "send", f"send to {_peer_name(event.peer)}")
            elif event.kind == "recv":
                self._complete(event, f"recv from {_peer_name(event.peer)}", event.detail.get("phase", event.kind))
            elif event.kind == "wait":
                self._complete(event, "wait", "wait for gradients")
            elif event.kind == "done":
                self._complete(event, self._free_row(f"tensor {event.tensor}", event), event.tensor)
            else:
                self._instant(event)

    def _complete(self, event: Event, row: str, name: str) -> None:
        start, end = self._micros(event.start), self._micros(event.start + event.duration)
        start = max(start, self._ends.get(row, start))
        end = self._ends[row] = max(start, end)
        self._write(event, {"ph": "X", "name": name, "ts": start, "dur": end - start, "tid": self._row(row)})

    def _instant(self, event: Event) -> None:
        row = f"tensor {event.tensor}" if event.tensor else "step"
        start = self._micros(event.start)
        self._write(event, {"ph": "i", "s": "t", "name": event.kind, "ts": start, "tid": self._row(row)})
        if event.kind == "failure":
            self._file.flush()

    def _free_row(self, row: str, event: Event) -> str:
        """Return the row, or another one if the tensor is synchronized twice at the same time."""
        found, number, start = row, 1, self._micros(event.start)
        while self._ends.get(found, start) > start:
            number += 1
            found = f"{row} ({number})"
        return found

    # -- the file --------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the file. If it cannot be written, end the trace with a warning."""
        with self._lock:
            try:
                yield
            except OSError as error:
                logger.warning("The trace could not be written: %s. %s ends here.", error, self.path)
                self._stop()
                with suppress(OSError):
                    self._file.close()

    def _micros(self, seconds: float) -> int:
        return round((seconds + self._offset) * 1e6)

    def _row(self, row: str) -> int:
        if row not in self._rows:
            self._rows[row] = number = len(self._rows)
            self._metadata("thread_name", tid=number, name=row)
            self._metadata("thread_sort_index", tid=number, sort_index=_sort_index(row))
        return self._rows[row]

    def _metadata(self, what: str, *, tid: int = 0, comma: bool = True, **args: Any) -> None:
        self._line({"ph": "M", "name": what, "pid": self._rank, "tid": tid, "args": args}, comma)

    def _write(self, event: Event, fields: dict[str, Any]) -> None:
        args = {"tensor": event.tensor, "round": event.round, "bytes": event.nbytes, "peer": event.peer, **event.detail}
        if event.kind == "recv":
            args["waited_us"] = round(event.duration * 1e6)
        known = {key: value for key, value in args.items() if value not in (None, "", -1)}
        self._line({**fields, "cat": event.kind, "pid": self._rank, "args": known}, True)

    def _line(self, fields: dict[str, Any], comma: bool) -> None:
        self._file.write((",\n" if comma else "") + json.dumps(fields, default=str))


def _peer_name(peer: int | None) -> str:
    return "the aggregator" if peer is None else f"rank {peer}"


def path_of(path: str | Path, rank: int, default_suffix: str = "") -> Path:
    """Return the file of one rank. A path without a suffix gets the default one."""
    path = Path(path)
    if "{rank}" in str(path):
        return Path(str(path).replace("{rank}", str(rank)))
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or default_suffix}")


def _sort_index(row: str) -> int:
    """Return the position of a row: codec and link above tensors."""
    kinds = ("step", "wait", "codec", "send", "recv", "tensor")
    return kinds.index(row.split(" ", 1)[0])
