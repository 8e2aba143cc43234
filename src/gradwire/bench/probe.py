"""The probe: what compression would do for a model, on the ranks, links and cores that it will train on.

1. *No communication.* Forward and backward with a hook that sends nothing: the bound, and the backward's timeline.
2. *Dense.* DDP's own all-reduce, and its 16-bit hooks.
3. *Survey and plan.* Links, codecs and engine are measured by all ranks; rank 0 plans, and predicts each method alone.
4. *Candidates.* The plan, the methods that are best alone and what the user names are attached and timed.
5. *Again*, since what else runs on these cores only adds time and the lesser figure counts: no communication, which is
   the bound; everything, where a step was shorter than that bound; and where all this comes to compressing, DDP's fp32
   and what would take its place.

A step is forward and backward, without an optimizer. DDP's own bytes are those of a ring; nothing counts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch.distributed as dist

from gradwire.bench.advice import FP32, GRADWIRE, HALF, Measurement, ProbeFindings, limit_of
from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.probe_timing import Stopwatch, TimedBackward
from gradwire.bench.statistics import ring_bytes
from gradwire.compressors.base.registry import compressor_of
from gradwire.core.spec import TensorSpec
from gradwire.observe.notices import seldom
from gradwire.planner import PlannedTensor, PlanTable, plan, uniform
from gradwire.planner import fidelity as levels
from gradwire.planner.closed_forms import native_seconds
from gradwire.planner.costs import Costs, LinkCosts
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.calibration import Calibration

DEFAULT_SECONDS = 3.0
SILENT, DDP_FP32 = "no communication", "DDP fp32"
_LABELS = {
    SILENT: "steps without communication",
    DDP_FP32: "DDP's all-reduce in fp32",
    "DDP fp16 hook": "DDP's fp16 hook",
    "DDP bf16 hook": "DDP's bf16 hook",
}
SINGLE_METHODS = 2  # of the level's, beside its plan

Say = Callable[[str], None]


class ProbeCandidate(NamedTuple):
    """What gradwire may do: a name for people, the plan that is attached, the line that chooses it, and the planner's
    table, which only compressors that no closed form describes lack.
    """

    name: str
    plan: Plan
    use: str
    table: PlanTable | None = None


@dataclass
class Prober:
    """Measures one job on this rank. All ranks make one alike and call `run`.

    Attributes:
        job: model and batch, on the device where they run.
        fidelity: see `gradwire.planner.fidelity`.
        extra: specs of further candidates.
        seconds: of a measurement, about.
        say: is told what comes next.
        tables: by name of the candidate, once it has run.
    """

    job: ProbeJob
    fidelity: str = "balanced"
    extra: Sequence[str] = ()
    seconds: float = DEFAULT_SECONDS
    say: Say = lambda text: None
    tables: dict[str, PlanTable] = field(default_factory=dict)

    def run(self) -> ProbeFindings:
        """Measure everything.

        Raises:
            GradwireError: a name is unknown, the model cannot be copied, or ranks differ or fail.
        """
        self._methods = levels.methods(self.fidelity)
        level = {method.spec for method in self._methods}
        self._extra = [levels.RankedCompressor(spec, levels.strategies(spec)) for spec in dict.fromkeys(self.extra)
                       if spec not in level]  # fmt: skip
        for method in self._extra:
            compressor_of(method.spec)  # names and options are looked at before anything is measured
        self._specs = {name: TensorSpec.of(parameter) for name, parameter in self.job.parameters.items()}
        synchronizer = Synchronizer(None, "none", tensors=self._specs)
        try:
            return self._run(synchronizer)
        finally:
            synchronizer.close()

    def _run(self, synchronizer: Synchronizer) -> ProbeFindings:
        survey = Calibration(synchronizer, max(spec.numel for spec in self._specs.values()))
        watch = Stopwatch(self.job, survey, self.seconds)
        self._runs: dict[str, Callable[[], TimedBackward]] = {SILENT: watch.without_communication}
        self._timed: dict[str, TimedBackward] = {}
        self._time(SILENT)
        silent = self._timed[SILENT]
        result = ProbeFindings(
            self.job.name, synchronizer.world_size, dist.get_backend(),
            sum(spec.numel for spec in self._specs.values()), len(self._specs), self.fidelity,
            compute=silent.step, backward=silent.buckets[-1].ready,
        )  # fmt: skip
        if synchronizer.world_size == 1:
            return result
        # Not every Gloo adds bfloat16, and its bytes are those of fp16.
        halves = {f"DDP {name} hook": name for name in (("fp16", "bf16") if result.backend == "nccl" else ("fp16",))}
        for name, hook in {DDP_FP32: "fp32", **halves}.items():
            self._runs[name] = partial(watch.with_hook, hook)
            self._time(name)
        priced = [
            method for method in (*self._methods, *self._extra) if not compressor_of(method.spec).requires_full_tensor
        ]
        self.say(f"measuring links and {len({'none', *(method.spec for method in priced)})} codecs")
        costs = survey.costs([method.spec for method in priced], say=seldom(self.say))
        own = replace(costs, native=_native_hop(self._timed[DDP_FP32], costs))
        self.say("planning")
        candidates, untried = self._candidates(synchronizer, silent, own)
        for candidate in candidates:
            self._runs[candidate.name] = partial(watch.with_plan, candidate.plan)
            self._time(candidate.name)
        half = _all_reduced(silent, own, 2)
        ways = [
            _Way(DDP_FP32, FP32, _all_reduced(silent, costs, 1), "nothing to add to DDP"),
            *(_Way(name, HALF, half, f"ddp.register_comm_hook(None, default_hooks.{hook}_compress_hook)",
                   self.fidelity != "exact") for name, hook in halves.items()),
            *map(_Way.of, candidates),
        ]  # fmt: skip
        result = replace(result, latency=costs.slowest.latency, untried=untried)
        self._time(SILENT)
        found = self._found(result, ways, costs)
        if found.too_noisy:
            self.say("a step was shorter than one without communication: timing all of them again")
            self._time(*self._runs, quiet=True)
            found = self._found(result, ways, costs)
        if found.advised is not None and found.advised.name in {candidate.name for candidate in candidates}:
            self._time(DDP_FP32, found.advised.name)
            found = self._found(result, ways, costs)
        return found

    def _time(self, *names: str, quiet: bool = False) -> None:
        """Time these ways. What was timed before keeps the lesser figure: what else runs only adds time."""
        if not quiet:
            again = " again" if names[0] in self._timed else ""
            self.say(f"timing {' and '.join(_LABELS.get(name, name) for name in names)}{again}")
        for name in names:
            found = self._runs[name]()
            self._timed[name] = min(self._timed.get(name, found), found, key=attrgetter("step"))

    def _found(self, result: ProbeFindings, ways: Sequence[_Way], costs: Costs) -> ProbeFindings:
        """The result with what has been timed so far."""
        compute = self._timed[SILENT].step
        # A step that is shorter than its bytes at the measured rate shows that the link carries more.
        shown = [self._timed[way.name].step / max(1.0, _sent_bytes(way, self._timed[way.name])) for way in ways]
        seconds_per_byte = min(costs.slowest.seconds_per_byte, *shown)
        scale = _Scale(compute, seconds_per_byte)
        rows = tuple(scale.row(way, self._timed[way.name]) for way in ways)
        return replace(result, compute=compute, bytes_per_second=1 / seconds_per_byte, rows=rows)

    # -- candidates ------------------------------------------------------------------------------------------

    def _candidates(
        self, synchronizer: Synchronizer, silent: TimedBackward, costs: Costs
    ) -> tuple[list[ProbeCandidate], dict[str, float]]:
        """What to try, and the predicted steps of what is not worth it."""
        texts = [table.to_json() for table in self._plan(silent, costs)] if synchronizer.rank == 0 else []
        level, *singles = map(PlanTable.from_json, json.loads(synchronizer.share(json.dumps(texts))))
        found = []
        if not level.native:
            specs = " and ".join(sorted({row.spec for row in level.rows} - {"none"}))
            use = f'gw.attach(ddp, "auto", fidelity="{self.fidelity}", optimizer=optimizer)'
            found.append(ProbeCandidate(f"gradwire's plan ({specs or 'dense'})", level.plan(), use, level))
        singles = [table for table in singles if _choices(table) != _choices(level)]
        tried = [table for table in singles if table.fidelity in self.extra]
        tried += [table for table in singles if table.fidelity not in self.extra][:SINGLE_METHODS]
        found += [ProbeCandidate(f"gradwire {table.fidelity}", table.plan(), _use(table), table) for table in tried]
        for method in self._extra:
            compressor = compressor_of(method.spec)
            if compressor.requires_full_tensor:
                found.append(ProbeCandidate(f"gradwire {method.spec}", Plan(compressor), _attach(f'"{method.spec}"')))
        self.tables = {candidate.name: candidate.table for candidate in found if candidate.table is not None}
        return found, {table.fidelity: table.step for table in singles if table not in tried}

    def _plan(self, silent: TimedBackward, costs: Costs) -> list[PlanTable]:
        """The level's plan, and then each method alone, the fastest first."""
        buckets, rest = silent.buckets, _rest(silent)
        ready = {name: bucket.ready for bucket in buckets for name in bucket.names}
        tensors = [
            PlannedTensor(name, spec.shape, spec.dtype, ready.get(name, buckets[-1].ready))
            for name, spec in self._specs.items()
        ]
        nbytes = max(1, sum(bucket.nbytes for bucket in buckets) // len(buckets))
        level = plan(tensors, costs, fidelity=self.fidelity, rest=rest, bucket_bytes=nbytes)
        singles = [
            uniform(tensors, costs, method, rest=rest, bucket_bytes=nbytes)
            for method in (*self._methods, *self._extra)
            if method.spec in costs.codecs and method.spec != levels.DENSE.spec
        ]
        return [level, *sorted(singles, key=lambda table: table.step)]


class _Way(NamedTuple):
    """One way of the gradients, before it is timed. See `Measurement`."""

    name: str
    kind: str
    predicted: float | None
    use: str
    allowed: bool = True

    @classmethod
    def of(cls, candidate: ProbeCandidate) -> _Way:
        table = candidate.table
        kind = GRADWIRE if table is None or table.compresses else FP32
        return cls(candidate.name, kind, None if table is None else table.step, candidate.use)


@dataclass(frozen=True)
class _Scale:
    """What steps are compared with: the step without communication, and the link."""

    compute: float
    seconds_per_byte: float

    def row(self, way: _Way, timed: TimedBackward) -> Measurement:
        nbytes = _sent_bytes(way, timed)
        wire = nbytes * self.seconds_per_byte
        return Measurement(
            way.name, way.kind, way.predicted, timed.step, timed.steps, nbytes, timed.codec,
            ideal=max(self.compute, wire), limit=limit_of(timed.step, self.compute, wire, timed.codec),
            allowed=way.allowed, use=way.use,
        )  # fmt: skip


def _sent_bytes(way: _Way, timed: TimedBackward) -> float:
    """Bytes that a rank sends in a step."""
    if not timed.buckets:
        return timed.sent_bytes
    whole = ring_bytes(sum(bucket.nbytes for bucket in timed.buckets), dist.get_world_size())  # DDP's own all-reduce
    return whole / (2 if way.kind == HALF else 1)


def _all_reduced(silent: TimedBackward, costs: Costs, divisor: int) -> float:
    """Seconds of a step by DDP's own all-reduce, a bucket after another, of so many times fewer bytes."""
    finish = 0.0
    for bucket in silent.buckets:
        finish = max(finish, bucket.ready) + native_seconds(bucket.nbytes / divisor, costs)
    return _rest(silent) + max(silent.buckets[-1].ready, finish)


def _rest(silent: TimedBackward) -> float:
    """Seconds of a step before the first bucket and after the last gradient."""
    return max(0.0, silent.step - silent.buckets[-1].ready)


def _native_hop(dense: TimedBackward, costs: Costs) -> LinkCosts:
    """A hop of DDP's own all-reduce, as it was seen: what it takes beside latency counts by bytes."""
    link, hops = costs.slowest, 2 * (costs.world_size - 1)
    waiting = min(hops * link.latency * len(dense.buckets), dense.busy / 2)
    nbytes = max(1, sum(bucket.nbytes for bucket in dense.buckets))
    own = (dense.busy - waiting) * costs.world_size / (hops * nbytes)
    return LinkCosts(link.latency, max(own, link.seconds_per_byte))


def _choices(table: PlanTable) -> list[tuple[str, str, int]]:
    return [(row.spec, row.strategy, row.partitions) for row in table.rows]


def _use(table: PlanTable) -> str:
    """The line of code that is nearest to a plan of one method."""
    large = [row for row in table.rows if row.spec != "none"]
    if not large:
        return _attach(f'"{table.fidelity}"')
    partitions = max(row.partitions for row in large)
    more = f", partitions={partitions}" if partitions > 1 else ""
    return _attach(f'gw.Plan("{table.fidelity}", strategy="{large[0].strategy}"{more})')


def _attach(method: str) -> str:
    return f"gw.attach(ddp, {method}, optimizer=optimizer)"
