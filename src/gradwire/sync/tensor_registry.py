"""The tensors that all ranks agreed on, and the check of frames about them.

`admit` refuses a header that does not fit, before a byte of its body is allocated. Shapes, element types and sizes come
from here, never from a frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.compressors.base.registry import code
from gradwire.core.errors import FrameError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.sync import fusion
from gradwire.sync.codec import DENSE
from gradwire.sync.exchange import EXCHANGE_TENSOR, MAX_NUMBERS, PROBE_BYTES, PROBE_TENSOR
from gradwire.sync.fusion import FUSION_FLAG
from gradwire.sync.nodes import Nodes
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.sparse_codec import max_list_bytes
from gradwire.sync.strategies.hierarchical import DENSE_STAGES
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, describe

_GroupKey = tuple[torch.dtype, str, str, bool]


class TensorRegistry:
    """Names, specs and plan entries by tensor id.

    Args:
        plan: Plan of the entries.
        world_size: Number of ranks.
        nodes: Returns the ranks of each node. Called for hierarchical entries only. None for one rank per node.

    Attributes:
        names: Names in the agreed order.
        ids: Index of each name in `names`.
        specs: Specs of the full tensors.
        entries: Plan entries on these nodes.
        rotations: Owner of the first range of each tensor, modulo the number of ranks.
        need_optimizer: Names of the tensors whose compressor needs the optimizer's state.
        version: Counts the changes of tensors and entries.
    """

    def __init__(self, plan: Plan, world_size: int, nodes: Callable[[], Nodes] | None = None) -> None:
        self.names: list[str] = []
        self.ids: dict[str, int] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.entries: dict[str, PlanEntry] = {}
        self._plan = plan
        self._world_size = world_size
        self._nodes = nodes
        self.rotations: dict[str, int] = {}
        self.need_optimizer: frozenset[str] = frozenset()
        self.version = 0
        self._group_elements: Counter[_GroupKey] = Counter()
        self._group_bytes: Counter[tuple[_GroupKey, FrameKind]] = Counter()  # of a message of compressed tensors

    def describe(self, specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
        """Return what ranks must agree on before `add`."""
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
            entry = self._resolve(self._plan.entry(name, spec))
            self.ids[name] = len(self.names)
            self.names.append(name)
            self.specs[name] = spec
            self.entries[name] = entry
        self._count()

    def forget(self, names: Iterable[str]) -> None:
        """Undo the latest `add`, because the ranks could not agree on its names."""
        for name in names:
            self.names.remove(name)
            del self.ids[name], self.specs[name], self.entries[name]
        self._count()

    def replan(self, plan: Plan) -> None:
        """Replace the entries of all tensors by those of another plan."""
        self._plan = plan
        self.entries = {name: self._resolve(plan.entry(name, spec)) for name, spec in self.specs.items()}
        self._count()

    def _resolve(self, entry: PlanEntry) -> PlanEntry:
        """Return a hierarchical entry as it is on these nodes: dense on one, scatter-reduce with one rank on each."""
        if entry.strategy != "hierarchical" or self._world_size == 1:
            return entry
        num_nodes = self._world_size if self._nodes is None else len(self._nodes())
        if num_nodes == 1:
            strategy = "scatter_reduce" if entry.batched else "ring"
            return replace(entry, compressor=DENSE, strategy=strategy, feedback="none")
        return replace(entry, strategy="scatter_reduce") if num_nodes == self._world_size else entry

    def _count(self) -> None:
        """Compute owners, and the limits of fused frames: the largest group holds all tensors of its kind.

        Meanwhile, frames of tensors that are known already arrive and are checked, on another thread.
        """
        sizes = [(self.entries[name], self.specs[name].numel) for name in self.names]
        self.rotations = dict(zip(self.names, fusion.rotations(sizes)))
        self.need_optimizer = frozenset(name for name, each in self.entries.items() if each.compressor.needs_optimizer)
        elements: Counter[_GroupKey] = Counter()
        num_bytes: Counter[tuple[_GroupKey, FrameKind]] = Counter()
        for name, (entry, numel) in zip(self.names, sizes):
            is_fused = fusion.is_fused(entry, numel)
            if entry.batched or is_fused:
                elements[self._group_key(name)] += numel
            for kind in _kinds(entry) if is_fused else ():
                bound = fusion.LENGTH_BYTES + self._bound(kind, entry, self.specs[name])
                num_bytes[self._group_key(name), kind] += bound
        self._group_elements, self._group_bytes = elements, num_bytes
        self.version += 1

    def _group_key(self, name: str) -> _GroupKey:
        """What the tensors of a group have in common."""
        entry = self.entries[name]
        return self.specs[name].dtype, repr(entry.compressor), entry.strategy, entry.batched

    def early_bytes_limit(self) -> int:
        """Return the most bytes by which a peer can be ahead: it can finish this step and send all of the next one."""
        step = sum(self._early_bytes(self.entries[name], spec) for name, spec in self.specs.items())
        # At most three frames per chunk (stats, to the owner, back), in each of two steps.
        num_chunks = sum(
            self.entries[name].num_ranges(spec.numel, self._world_size) for name, spec in self.specs.items()
        )
        return 4 * step + 6 * num_chunks * HEADER_BYTES + (1 << 20)

    def _early_bytes(self, entry: PlanEntry, spec: TensorSpec) -> int:
        payload = self._bound(FrameKind.PAYLOAD, entry, spec)
        is_summable = isinstance(entry.compressor, SummableCompressor)
        total = self._bound(FrameKind.AGGREGATE, entry, spec, self._world_size) if is_summable else 0
        return max(payload, total, spec.nbytes if entry.strategy == "hierarchical" else 0)

    def admit(self, header: Header) -> None:
        """Check a header against what the ranks agreed on.

        Raises:
            FrameError: An unknown tensor, another compressor or element type, or a range or length out of bounds.
        """
        if header.tensor == EXCHANGE_TENSOR:
            if header.kind is not FrameKind.STATS or header.length != 8 * header.count or header.count > MAX_NUMBERS:
                raise FrameError(f"Expected numbers of 8 bytes, got {header.length} bytes (in {describe(header)}).")
            return
        if header.tensor == PROBE_TENSOR:
            if header.kind is not FrameKind.STATS or header.length not in (0, PROBE_BYTES):
                raise FrameError(f"Expected a probe of {PROBE_BYTES} bytes or none (in {describe(header)}).")
            return
        if header.tensor & FUSION_FLAG and not self.entries[self._name(header)].batched:
            self._admit_fused(header)
            return
        entry, spec = self._expected(header)
        if entry.strategy == "hierarchical" and header.stage in DENSE_STAGES:
            entry = replace(entry, compressor=DENSE)
        _expect_encoding(header, entry, spec)
        if header.offset + header.count > spec.numel:
            raise FrameError(f"Expected a range within {spec.numel} elements, got one beyond (in {describe(header)}).")
        if not entry.compressor.requires_full_tensor:
            spec = TensorSpec((header.count,), spec.dtype)
        elif header.count != spec.numel:
            raise FrameError(f"Expected all {spec.numel} elements, got a range (in {describe(header)}).")
        bound = self._bound(header.kind, entry, spec, header.stage)
        if header.length > bound:
            raise FrameError(f"Expected at most {bound} bytes, got {header.length} (in {describe(header)}).")
        has_fixed_size = header.kind is not FrameKind.PAYLOAD and not _is_list(header.kind, entry)
        if has_fixed_size and header.length not in (0, bound):
            raise FrameError(f"Expected {bound} bytes, got {header.length} (in {describe(header)}).")

    def _admit_fused(self, header: Header) -> None:
        """Check the header of a fused message against the limits of all such groups. Its body is checked later."""
        name = self._name(header)
        entry, key = self.entries[name], self._group_key(name)
        _expect_encoding(header, entry, self.specs[name])
        _expect_kind(header.kind, entry)
        max_elements, max_bytes = self._group_elements[key], self._group_bytes[key, header.kind]
        if header.offset or not 0 < header.count <= max_elements:
            raise FrameError(f"Expected tensors of {max_elements} elements at most (in {describe(header)}).")
        if header.length > max_bytes:
            raise FrameError(f"Expected at most {max_bytes} bytes, got {header.length} (in {describe(header)}).")

    def _expected(self, header: Header) -> tuple[PlanEntry, TensorSpec]:
        name = self._name(header)
        entry, spec = self.entries[name], self.specs[name]
        if header.tensor & FUSION_FLAG:  # a dense group holds at most all tensors of its kind
            spec = TensorSpec((self._group_elements[self._group_key(name)],), spec.dtype)
        return entry, spec

    def _name(self, header: Header) -> str:
        """Return the name of the frame's (first) tensor."""
        number = header.tensor & ~FUSION_FLAG
        if number >= len(self.names):
            raise FrameError(f"Expected one of {len(self.names)} tensors, got another (in {describe(header)}).")
        return self.names[number]

    def _bound(self, kind: FrameKind, entry: PlanEntry, spec: TensorSpec, stage: int = 0) -> int:
        compressor = entry.compressor
        _expect_kind(kind, entry)
        if _is_list(kind, entry):
            return max_list_bytes(spec.numel, self._world_size)
        if kind is FrameKind.STATS:
            return 4 * sum(length for length, _ in compressor.stats_spec(spec))
        if kind is FrameKind.AGGREGATE and isinstance(compressor, SummableCompressor):
            return compressor.accumulator_size(spec) * entry.accumulator_dtype(stage, self._world_size).itemsize
        return compressor.max_encoded_bytes(spec)


def _kinds(entry: PlanEntry) -> list[FrameKind]:
    """Return the kinds of frames that a tensor has."""
    stats = [FrameKind.STATS] if entry.compressor.needs_stats else []
    has_sums = isinstance(entry.compressor, SummableCompressor) or entry.strategy == "sparse_reduce"
    return [FrameKind.PAYLOAD, *stats, *([FrameKind.AGGREGATE] if has_sums else [])]


def _is_list(kind: FrameKind, entry: PlanEntry) -> bool:
    """Whether a frame has one owner's list of pairs."""
    return entry.strategy == "sparse_reduce" and kind is not FrameKind.STATS


def _expect_kind(kind: FrameKind, entry: PlanEntry) -> None:
    if kind not in _kinds(entry):
        raise FrameError(f"Expected no {kind.name} frames of {entry.compressor.name}, got one.")


def _expect_encoding(header: Header, entry: PlanEntry, spec: TensorSpec) -> None:
    if header.compressor != code(entry.compressor.name) or header.dtype != ELEMENT_TYPES[spec.dtype]:
        raise FrameError(f"Expected {entry.compressor.name} of {spec.dtype}, got others (in {describe(header)}).")
