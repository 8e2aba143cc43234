"""Candidates: the ways to average gradients that `auto` and `gradwire probe` choose from, and their predicted steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradwire.compressors.base.registry import spec_of
from gradwire.core import torch_private
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, PlanTable, plan, uniform
from gradwire.planner.closed_forms import Route, native_seconds, route
from gradwire.planner.costs import Costs
from gradwire.planner.fidelity import RankedCompressor
from gradwire.planner.options import codec_for, num_shares
from gradwire.sync.fusion import is_fused
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.step_clock import Timing

FP32, HALF, GRADWIRE = KINDS = ("fp32", "half", "gradwire")
"""What happens to gradients, the least first: nothing is rounded, DDP rounds them to 16 bits, gradwire compresses."""

Future = torch.futures.Future[torch.Tensor]
HOOKS: dict[str, Callable[[dist.ProcessGroup, torch_private.GradBucket], Future]] = {
    "fp32": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
"""DDP's own all-reduce."""


@dataclass(frozen=True)
class Candidate:
    """A way to average gradients: a plan of gradwire's, or DDP's own all-reduce.

    Attributes:
        name: Name for people.
        hook: One of `HOOKS`, where there is no plan.
        choices: Compressor, strategy and partitions of each tensor. Plans that choose the same are equal.
        plan: The plan of gradwire's.
        table: The planner's table of it, if it made the plan.
        baseline: Whether the plan is what gradwire does before anything is chosen.
    """

    name: str
    hook: str = "fp32"
    choices: tuple[tuple[str, str, int], ...] = ()
    plan: Plan | None = field(default=None, compare=False)
    table: PlanTable | None = field(default=None, compare=False)
    baseline: bool = False

    @classmethod
    def of(
        cls,
        table: PlanTable,
        name: str = "",
        given: Mapping[str, PlanEntry] = MappingProxyType({}),
        later: Plan | None = None,
    ) -> Candidate:
        """The candidate of a planner's table.

        Args:
            table: The table.
            name: Name for people; None for that of the compressors.
            given: Entries of the tensors that the planner does not plan.
            later: Plan of the tensors that are frozen now; None for dense.
        """
        specs = sorted({row.spec for row in table.rows if row.spec != "none"})
        choices = tuple((row.spec, row.strategy, row.partitions) for row in table.rows)
        name = name or f"gradwire, {' and '.join(specs) or 'dense'}"
        later = later or Plan("none", feedback=table.feedback or None)
        return cls(name, choices=choices, plan=Plan.of_entries({**table.entries(), **given}, later), table=table)

    @property
    def gradwire(self) -> bool:
        """Whether gradwire averages, rather than DDP's own all-reduce."""
        return self.plan is not None

    @property
    def casts_to_fp16(self) -> bool:
        """Whether any gradient is cast to fp16, whose range is narrow."""
        if self.plan is None:
            return self.hook == "fp16"
        return self.table is not None and any(row.spec == "fp16" for row in self.table.rows)

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.plan is None:
            return FP32 if self.hook == "fp32" else HALF
        is_dense = self.baseline or (self.table is not None and not self.table.compresses)
        return FP32 if is_dense else GRADWIRE


NATIVE = Candidate("DDP's all-reduce")
NATIVE_FP16 = Candidate("DDP's all-reduce in fp16", hook="fp16")
NATIVE_BF16 = Candidate("DDP's all-reduce in bf16", hook="bf16")


def native_step(timing: Timing, costs: Costs, hook: str = "fp32") -> float:
    """Predict seconds of a step by DDP's own all-reduce, one bucket after another."""
    finish = 0.0
    for bucket in timing.buckets:
        nbytes = bucket.nbytes if hook == "fp32" else bucket.nbytes_of_half
        finish = max(finish, bucket.ready) + native_seconds(nbytes, costs)
    return timing.rest + max(timing.backward, finish)


def planned_tensors(specs: Mapping[str, TensorSpec], timing: Timing) -> list[PlannedTensor]:
    """Return the tensors of a model, with the times at which their gradients were ready."""
    ready = {name: bucket.ready for bucket in timing.buckets for name in bucket.names}
    return [
        PlannedTensor(name, spec.shape, spec.dtype, ready.get(name, timing.backward)) for name, spec in specs.items()
    ]


def given_routes(
    given: Mapping[str, PlanEntry], specs: Mapping[str, TensorSpec], timing: Timing, costs: Costs
) -> list[tuple[PlannedTensor, Route]]:
    """Return the tensors that have an entry already, with their routes. One that was not measured has none.

    A batch of dense tensors is one, with their elements: it has one message.
    """
    tensors, known = dict[object, PlannedTensor](), dict[object, PlanEntry]()
    for tensor in planned_tensors(specs, timing):
        entry = given.get(tensor.name)
        if entry is None or spec_of(entry.compressor) not in costs.codecs:
            continue
        name: object = tensor.name
        if entry.batched:
            name = tensor.ready, repr(entry.compressor), entry.strategy, entry.partitions, tensor.dtype
            if name in tensors:
                tensor = replace(tensor, shape=(tensors[name].numel + tensor.numel,))
        tensors[name], known[name] = tensor, entry

    def group(name: object) -> object:
        entry, tensor = known[name], tensors[name]
        return (tensor.ready, repr(entry.compressor), entry.strategy) if is_fused(entry, tensor.numel) else name

    sizes, found = Counter(map(group, known)), []
    for name, entry in known.items():
        tensor, spec, shares = tensors[name], spec_of(entry.compressor), num_shares(entry.strategy, costs)
        found.append((tensor, route(
            spec, entry.strategy, entry.num_ranges(tensor.numel, shares), tensor.numel, costs, tensor.dtype.itemsize,
            fused=sizes[group(name)], codec=codec_for(tensor, spec, costs), in_place=entry.adds_in_place,
        )))  # fmt: skip
    return found


def plan_tables(
    synchronizer: Synchronizer,
    specs: Mapping[str, TensorSpec],
    timing: Timing,
    costs: Costs,
    methods: Sequence[RankedCompressor],
    *,
    fidelity: str,
    min_elements: int | None = None,
    native: Sequence[str] = ("fp32",),
    alone: Sequence[RankedCompressor] = (),
    feedback: str = "",
    given: Mapping[str, PlanEntry] = MappingProxyType({}),
) -> list[PlanTable]:
    """Plan on rank 0, and share the plans with all ranks.

    Args:
        synchronizer: Synchronizer of the job.
        specs: Tensors to plan for.
        timing: Steps with the timeline of the backward pass.
        costs: Costs of this job.
        methods: Compressors to choose from.
        fidelity: Level of fidelity; see `gradwire.planner.fidelity`.
        min_elements: See `gradwire.planner.plan`.
        native: See `gradwire.planner.plan`.
        alone: Compressors to plan with one at a time.
        feedback: See `gradwire.planner.plan`.
        given: Entries of other tensors of the synchronizer, which share links and processors with those of `specs`.

    Returns:
        The level's plan, then one plan per compressor of `alone`, the fastest first.
    """
    texts: list[str] = []
    if synchronizer.rank == 0:
        tensors = planned_tensors(specs, timing)
        level = plan(
            tensors, costs, methods, fidelity=fidelity, min_elements=min_elements, rest=timing.rest,
            bucket_bytes=None, native=native, feedback=feedback,
            given=given_routes(given, synchronizer.tensors, timing, costs),
        )  # fmt: skip
        singles = [
            uniform(tensors, costs, method, min_elements=min_elements, rest=timing.rest, bucket_bytes=None)
            for method in alone
        ]
        texts = [table.to_json() for table in (level, *sorted(singles, key=lambda table: table.step))]
    return [PlanTable.from_json(text) for text in json.loads(synchronizer.share(json.dumps(texts)))]
