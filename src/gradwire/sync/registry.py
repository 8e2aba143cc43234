"""The tensors that a synchronizer's ranks agreed on, and what frames about them may look like.

The receiver's side of the wire contract: `admit` refuses a header that does not fit before a byte of its body is
allocated. Shapes, element types and sizes come from here, never from a packet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gradwire.compressors.base import SummableCompressor
from gradwire.compressors.base.registry import code
from gradwire.core.errors import FrameError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.sync import dense_fusion, fusion
from gradwire.sync.codec import DENSE
from gradwire.sync.dense_fusion import BATCH_FLAG, DenseFusionKey, Place, batch_entry
from gradwire.sync.exchange import EXCHANGE_TENSOR, MAX_NUMBERS, PROBE_BYTES, PROBE_TENSOR
from gradwire.sync.nodes import Nodes
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies.hierarchical import DENSE_STAGES
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, describe

_DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}


class TensorRegistry:
    """Names, specs and plan entries by tensor id.

    Args:
        plan: gives the entries.
        world_size: ranks in the group.
        nodes: gives the ranks of each node; asked when a plan has hierarchical entries. None for a node a rank.
    """

    def __init__(self, plan: Plan, world_size: int, nodes: Callable[[], Nodes] | None = None) -> None:
        self.names: list[str] = []
        self.ids: dict[str, int] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.entries: dict[str, PlanEntry] = {}
        self._plan = plan
        self._world_size = world_size
        self._nodes = nodes
        self._batched: Counter[DenseFusionKey] = Counter()  # elements
        self._bundled = 0, 0  # elements, and bytes of their payloads
        self.places: dict[str, int] = {}
        self.batches: dict[str, Place] = {}

    def describe(self, specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
        """What ranks must agree on before `add`."""
        return [
            {
                "name": name,
                "shape": list(spec.shape),
                "dtype": str(spec.dtype),
                **self._plan.entry(name, spec).describe(self._world_size),
            }
            for name, spec in specs.items()
        ]

    def add(self, specs: Mapping[str, TensorSpec]) -> None:
        for name, spec in specs.items():
            entry = self._place(self._plan.entry(name, spec))
            self.ids[name] = len(self.names)
            self.names.append(name)
            self.specs[name] = spec
            self.entries[name] = entry
        self._count()

    def forget(self, names: Iterable[str]) -> None:
        """Take back the latest `add`, whose names the ranks could not agree on."""
        for name in names:
            self.names.remove(name)
            del self.ids[name], self.specs[name], self.entries[name]
        self._count()

    def replan(self, plan: Plan) -> None:
        """Take the entries of all tensors from another plan."""
        self._plan = plan
        self.entries = {name: self._place(plan.entry(name, spec)) for name, spec in self.specs.items()}
        self._count()

    def _place(self, entry: PlanEntry) -> PlanEntry:
        """What a hierarchical entry comes to on these nodes: dense on one alone, scatter-reduce with a rank on each."""
        if entry.strategy != "hierarchical" or self._world_size == 1:
            return entry
        num_nodes = self._world_size if self._nodes is None else len(self._nodes())
        if num_nodes == 1:
            strategy = "scatter_reduce" if entry.batched else "ring"
            return replace(entry, compressor=DENSE, strategy=strategy, feedback="none")
        return replace(entry, strategy="scatter_reduce") if num_nodes == self._world_size else entry

    def _count(self) -> None:
        """What the largest batch and bundle can hold: all tensors that may travel so."""
        bundled = [name for name in self.names if fusion.travels_in_bundles(self.entries[name], self.specs[name].numel)]
        self.places = {name: place for place, name in enumerate(bundled)}
        max_bytes = (self.entries[name].compressor.max_encoded_bytes(self.specs[name]) for name in bundled)
        self._bundled = sum(self.specs[name].numel for name in bundled), fusion.bound(max_bytes)
        self.batches = dense_fusion.places(
            (name, self.entries[name], self.specs[name]) for name in reversed(self.names)
        )
        self._batched = Counter()
        for name, (kind, _) in self.batches.items():
            self._batched[kind] += self.specs[name].numel

    def early_bytes_limit(self) -> int:
        """Most bytes a peer can rightly be ahead by: it can finish this step and send all of the next one."""
        step = sum(self._early_bytes(self.entries[name], spec) for name, spec in self.specs.items())
        # At most three frames a part (stats, there, back), in each of two steps.
        num_parts = self._world_size * sum(self.entries[name].partitions for name in self.specs)
        return 4 * step + 6 * num_parts * HEADER_BYTES + (1 << 20)

    def _early_bytes(self, entry: PlanEntry, spec: TensorSpec) -> int:
        payload = self._bound(FrameKind.PAYLOAD, entry, spec)
        is_summable = isinstance(entry.compressor, SummableCompressor)
        total = self._bound(FrameKind.AGGREGATE, entry, spec, self._world_size) if is_summable else 0
        return max(payload, total, spec.nbytes if entry.strategy == "hierarchical" else 0)

    def admit(self, header: Header) -> None:
        """Check a header against what was agreed.

        Raises:
            FrameError: an unknown tensor, another compressor or element type, a range or a length out of bounds.
        """
        if header.tensor == EXCHANGE_TENSOR:
            if header.kind is not FrameKind.STATS or header.length != 8 * header.count or header.count > MAX_NUMBERS:
                raise FrameError(f"Expected numbers of 8 bytes, got {header.length} bytes (in {describe(header)}).")
            return
        if header.tensor == PROBE_TENSOR:
            if header.kind is not FrameKind.STATS or header.length not in (0, PROBE_BYTES):
                raise FrameError(f"Expected a probe of {PROBE_BYTES} bytes or none (in {describe(header)}).")
            return
        if header.tensor & fusion.BUNDLE_FLAG and not header.tensor & BATCH_FLAG:
            self._admit_bundle(header)
            return
        entry, spec = self._expected(header)
        if entry.strategy == "hierarchical" and header.stage in DENSE_STAGES:
            entry = replace(entry, compressor=DENSE)
        if header.compressor != code(entry.compressor.name) or header.dtype != ELEMENT_TYPES[spec.dtype]:
            raise FrameError(f"Expected {entry.compressor.name} of {spec.dtype}, got others (in {describe(header)}).")
        if header.offset + header.count > spec.numel:
            raise FrameError(f"Expected a range within {spec.numel} elements, got one beyond (in {describe(header)}).")
        whole = entry.compressor.requires_full_tensor
        if whole and header.count != spec.numel:
            raise FrameError(f"Expected all {spec.numel} elements, got a range (in {describe(header)}).")
        part = spec if whole else TensorSpec((header.count,), spec.dtype)
        bound = self._bound(header.kind, entry, part, header.stage)
        if header.length > bound:
            raise FrameError(f"Expected at most {bound} bytes, got {header.length} (in {describe(header)}).")
        if header.kind is not FrameKind.PAYLOAD and header.length not in (0, bound):
            raise FrameError(f"Expected {bound} bytes, got {header.length} (in {describe(header)}).")

    def _admit_bundle(self, header: Header) -> None:
        """A message of a bundle: which tensors it has is looked at with the body; here it is held to what all have."""
        number = header.tensor & ~fusion.BUNDLE_FLAG
        if number >= len(self.names) or not self._bundled[0]:
            raise FrameError(f"Expected one of {len(self.names)} tensors, got another (in {describe(header)}).")
        entry, spec = self.entries[self.names[number]], self.specs[self.names[number]]
        if header.compressor != code(entry.compressor.name) or header.dtype != ELEMENT_TYPES[spec.dtype]:
            raise FrameError(f"Expected {entry.compressor.name} of {spec.dtype}, got others (in {describe(header)}).")
        if header.kind is not FrameKind.PAYLOAD or header.offset or header.count > self._bundled[0]:
            raise FrameError(f"Expected payloads of {self._bundled[0]} elements at most (in {describe(header)}).")
        if header.length > self._bundled[1]:
            raise FrameError(f"Expected at most {self._bundled[1]} bytes, got {header.length} (in {describe(header)}).")

    def _expected(self, header: Header) -> tuple[PlanEntry, TensorSpec]:
        number = header.tensor & ~BATCH_FLAG
        if number >= len(self.names):
            raise FrameError(f"Expected one of {len(self.names)} tensors, got another (in {describe(header)}).")
        name = self.names[number]
        entry, spec = self.entries[name], self.specs[name]
        if not header.tensor & BATCH_FLAG:
            return entry, spec
        # All of its kind: which batch has which of them changes where further names are registered.
        place = self.batches.get(name)
        return batch_entry(entry), TensorSpec((0 if place is None else self._batched[place[0]],), spec.dtype)

    def _bound(self, kind: FrameKind, entry: PlanEntry, spec: TensorSpec, stage: int = 0) -> int:
        compressor = entry.compressor
        if kind is FrameKind.PAYLOAD:
            return compressor.max_encoded_bytes(spec)
        if kind is FrameKind.STATS and compressor.needs_stats:
            return 4 * sum(length for length, _ in compressor.stats_spec(spec))
        if kind is FrameKind.AGGREGATE and isinstance(compressor, SummableCompressor):
            return compressor.accumulator_size(spec) * entry.accumulator_dtype(stage, self._world_size).itemsize
        raise FrameError(f"Expected no {kind.name} frames of {compressor.name}, got one.")
