"""Tables of prefix codes, a tensor each, found anew every so many steps from the means that all ranks hold alike.

For compressors with a `refresh`. At one step of so many, the exponents of each mean are counted as it arrives, and a
thread makes a table of them beside what is left of the step. From the next step on it is used. Every rank holds the
same bits of every mean, so all of them make the same table and change to it at the same step, and nothing is sent.
Payloads carry the checksum of the table that they were written with.

A rank's own gradient may have more zeros than the mean of all, so +0 keeps a share of `SHARE_OF_ZERO` at least. A table
that would hardly be better than the one in use is not made, nor one of a mean that is all but zero, as of a layer that
has hardly begun to learn.

Source: GCOMP (SoCC 2024), section 4.4. Differences: a table a tensor; nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.compressors.lossless import FloatPacking
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.float_format import FORMATS
from gradwire.kernels.prefix_code import ESCAPE, NUM_SYMBOLS, RAW_BITS, PrefixCode
from gradwire.sync.bundle import Bundle
from gradwire.sync.item import Item

SHARE_OF_ZERO = 1 / 16
LEAST_COUNTED = 1024  # exponents of others than zeros, of which a table can be made
MIN_GAIN_BITS = 0.05  # an element; the best prefix code may be so far from the entropy


@dataclass
class _Counted:
    """Exponents of one tensor's mean, and what becomes of them."""

    compressor: FloatPacking
    dtype: torch.dtype
    counts: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SYMBOLS, np.int64))
    num_elements: int = 0
    table: Future[torch.Tensor | None] | None = None


class Tables:
    """The tables of one synchroniser, by parameter name. Counts on the engine's thread, switches between steps."""

    def __init__(self) -> None:
        self._tables: dict[str, torch.Tensor] = {}
        self._counted: dict[str, _Counted] = {}
        self._maker = ThreadPoolExecutor(
            1, thread_name_prefix="gradwire-tables"
        )  # starts no thread before its first work

    def of(self, name: str) -> torch.Tensor | None:
        """The table of a tensor, as `PrefixCode.to_bytes` gives it; None before its first."""
        return self._tables.get(name)

    def count(self, arrived: Item | Bundle, specs: Mapping[str, TensorSpec]) -> None:
        """Take note of means that have arrived, at the steps that are for it.

        Args:
            arrived: holds the means.
            specs: of the whole tensors.
        """
        compressor = arrived.entry.compressor
        if not isinstance(compressor, FloatPacking) or not compressor.refresh:
            return
        for item in arrived.members if isinstance(arrived, Bundle) else [arrived]:
            elements = as_array(item.values)
            if (item.step - 1) % compressor.refresh or item.nonfinite or elements.dtype not in FORMATS:
                continue
            counted = self._counted.setdefault(item.name, _Counted(compressor, item.dtype))
            kernels.exponent_counts(elements, counted.counts)
            counted.num_elements += elements.size
            if counted.num_elements == specs[item.name].numel:
                self._make(item.name)

    def switch(self) -> None:
        """Use from now on what was counted before."""
        for name, counted in self._counted.items():
            if counted.table is None:  # a range alone has come
                self._make(name)
            assert counted.table is not None, "made above"
            table = counted.table.result()
            if table is not None:
                self._tables[name] = table
        self._counted.clear()

    def _make(self, name: str) -> None:
        counted = self._counted[name]
        before = counted.compressor.code(counted.dtype, self.of(name))
        counted.table = self._maker.submit(_better, before, counted.counts.copy())

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tables of the next step. Between steps."""
        self.switch()
        return {name: table.clone() for name, table in sorted(self._tables.items())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with these tables.

        Raises:
            PayloadError, TypeError: they are none.
        """
        for name, table in state.items():
            if not isinstance(table, torch.Tensor) or table.dtype != torch.uint8:
                raise TypeError(
                    f"Expected a table of bytes for {name!r}, got {table!r}. Do: load what state_dict() gave."
                )
            PrefixCode.from_bytes(table.numpy().tobytes())
        self._counted.clear()
        self._tables = {name: table.clone() for name, table in state.items()}

    def close(self) -> None:
        """End the thread."""
        self._maker.shutdown(cancel_futures=True)


def _better(before: PrefixCode, counts: np.ndarray) -> torch.Tensor | None:
    """A table for these counts; None where the one before does nearly as well, or nothing can be said."""
    if counts[1:].sum() < LEAST_COUNTED:
        return None
    counts[0] = max(int(counts[0]), int(counts.sum() * SHARE_OF_ZERO))
    seen = counts[counts > 0]
    entropy = float((seen * np.log2(counts.sum() / seen)).sum())
    if _bits(before, counts) - entropy < MIN_GAIN_BITS * counts.sum():
        return None
    return torch.frombuffer(bytearray(PrefixCode.of(counts).to_bytes()), dtype=torch.uint8)


def _bits(code: PrefixCode, counts: np.ndarray) -> int:
    """What so many symbols take."""
    lengths = code.lengths.astype(np.int64)
    escaped = lengths[ESCAPE] + RAW_BITS
    lengths[(lengths == 0) | (np.arange(NUM_SYMBOLS) == ESCAPE)] = escaped
    return int((lengths * counts).sum())
