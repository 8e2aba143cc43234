"""`gradwire probe`: what compression would gain for a model, on the ranks, links and cores that it will train on.

1. *No communication.* Forward and backward with a hook that sends nothing: the bound, and the timeline of backward.
2. *Dense.* DDP's own all-reduce, and its 16-bit hooks.
3. *Calibration and plan.* All ranks measure links, codecs and the engine. Rank 0 plans, and predicts each compressor
   alone.
4. *Trials.* The plan, the compressors that are best alone, and those that the user names.
5. *Repetition.* Other work on these cores only adds time, so the shorter of two trials counts. The bound is always
   timed again; everything is, if a step was shorter than the bound; and if compression looks best, so are DDP's fp32
   all-reduce and what would take its place.

A step is forward and backward, without an optimizer. DDP's own bytes are those of a ring, and are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from gradwire.bench.advice import MIN_GAIN, Measurement, ProbeFindings
from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.probe_steps import SILENT, ReplayedSteps
from gradwire.bench.statistics import ring_bytes
from gradwire.core import threads
from gradwire.core.errors import GradwireError
from gradwire.observe.notices import seldom
from gradwire.planner import PlanTable
from gradwire.planner import fidelity as levels
from gradwire.planner.costs import Costs
from gradwire.planner.table import limit_of
from gradwire.sync.options import SyncOptions
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.calibration import Calibration
from gradwire.tuning.candidates import HALF, Candidate, native_step, plan_tables
from gradwire.tuning.trials import Trials, run_steps

DEFAULT_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 2.0
MAX_STEPS = 50
SINGLE_METHODS = 2  # compressors of the level that are tried alone, in addition to its plan
DDP_FP32 = Candidate("DDP fp32")
_LABELS = {SILENT.name: "steps without communication", DDP_FP32.name: "DDP's all-reduce in fp32"}
_LABELS |= {f"DDP {hook} hook": f"DDP's {hook} hook" for hook in ("fp16", "bf16")}


@dataclass
class Prober:
    """Measures one job on this rank. All ranks make the same one and call `run`.

    Attributes:
        job: Model and batch, on the device where they run.
        fidelity: Level of fidelity; see `gradwire.planner.fidelity`.
        extra: Specs of more compressors to try.
        seconds: About how long to time each candidate.
        timeout: Longest silence of a rank.
        say: Called with what comes next.
        momentum: Whether the optimizer of the training applies momentum; see `gradwire.planner.fidelity`.
        tables: The planner's tables by name of the candidate, once it has run.
    """

    job: ProbeJob
    fidelity: str = "balanced"
    extra: Sequence[str] = ()
    seconds: float = DEFAULT_SECONDS
    timeout: timedelta = SyncOptions.timeout
    say: Callable[[str], None] = lambda text: None
    momentum: bool = True
    tables: dict[str, PlanTable] = field(default_factory=dict)

    def run(self) -> ProbeFindings:
        """Measure everything.

        Raises:
            GradwireError: A name is unknown, the model cannot be copied, or ranks differ.
            SyncError: A rank was lost. Steps by DDP's own all-reduce may then be stuck on a thread that is left behind.
        """
        self._methods = levels.methods(self.fidelity, momentum=self.momentum)
        level = {method.spec for method in self._methods}
        self._extra = [levels.RankedCompressor.of(spec, levels.strategies(spec)) for spec in dict.fromkeys(self.extra)
                       if spec not in level]  # fmt: skip
        specs = self.job.specs
        synchronizer = Synchronizer(None, "none", tensors=specs, options=SyncOptions(self.timeout))
        try:
            calibration = Calibration(synchronizer, max(spec.numel for spec in specs.values()))
            self._steps = ReplayedSteps(self.job, calibration.largest, self.timeout)
            self._trials = Trials(self._steps, calibration.largest, MAX_STEPS, self.seconds)
            try:
                return self._watched(synchronizer, partial(self._run, synchronizer, calibration))
            finally:
                self._steps.close()
        finally:
            synchronizer.close()

    def _watched(self, synchronizer: Synchronizer, run: Callable[[], ProbeFindings]) -> ProbeFindings:
        """Run on another thread, and do not wait for it once a rank is lost: DDP's own all-reduce waits for minutes."""
        outcome: Future[ProbeFindings] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def end() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # each thread has its own
                outcome.set_result(run())
            except BaseException as error:
                outcome.set_exception(error)

        threads.start("gradwire-probe", end, on_error=None)
        while synchronizer.lost_peer() is None and not wait([outcome], _LOOK_SECONDS).done:
            pass
        # A rank that has finished leaves, too. And DDP may notice a lost rank before gradwire does.
        wait([outcome], _GRACE_SECONDS)
        error = outcome.exception(0) if outcome.done() else None
        if outcome.done() and (error is None or isinstance(error, GradwireError)):
            return outcome.result(0)
        until = time.monotonic() + _GRACE_SECONDS
        while (lost := synchronizer.lost_peer()) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        if lost is None:
            return outcome.result(0)
        if error is not None:
            lost.args = (f"{lost} This rank then failed: {error!r}",)
        raise lost from error

    def _run(self, synchronizer: Synchronizer, calibration: Calibration) -> ProbeFindings:
        self._time(SILENT)
        timings = self._trials.timings
        silent, numels = timings[SILENT], [spec.numel for spec in synchronizer.tensors.values()]
        result = ProbeFindings(
            self.job.name, synchronizer.world_size, dist.get_backend(), sum(numels), len(numels), self.fidelity,
            compute=silent.step, backward=silent.backward,
        )  # fmt: skip
        if synchronizer.world_size == 1:
            return result
        # Not every Gloo adds bfloat16, and its bytes are those of fp16.
        hooks = ("fp16", "bf16") if result.backend == "nccl" else ("fp16",)
        halves = [Candidate(f"DDP {hook} hook", hook) for hook in hooks]
        for candidate in (DDP_FP32, *halves):
            self._time(candidate)
        methods = *self._methods, *self._extra
        specs = [method.spec for method in methods]
        self.say(f"measuring links and {len({'none', *specs})} codecs")
        costs = calibration.costs(specs, say=seldom(self.say), native=timings[DDP_FP32])
        self.say("planning")
        alone = [method for method in methods if method.spec != levels.DENSE.spec]
        level, *singles = plan_tables(
            synchronizer, synchronizer.tensors, silent, costs, self._methods, fidelity=self.fidelity, alone=alone
        )
        uses, untried = self._candidates(level, singles)
        self.tables = {candidate.name: candidate.table for candidate in uses if candidate.table is not None}
        for candidate in uses:
            self._time(candidate)
        predicted = {DDP_FP32: native_step(silent, replace(costs, native=None))}
        predicted |= {half: native_step(silent, costs, half.hook) for half in halves}
        predicted |= {candidate: candidate.table.step for candidate in uses if candidate.table is not None}
        hook = "ddp.register_comm_hook(None, default_hooks.{}_compress_hook)"
        uses = {DDP_FP32: "nothing to add to DDP"} | {half: hook.format(half.hook) for half in halves} | uses
        result = replace(result, latency=costs.slowest.latency, untried=untried)
        self._time(SILENT)
        found = self._found(result, costs, uses, predicted)
        if found.too_noisy:
            self.say("a step was shorter than one without communication: timing all of them again")
            self._time(*timings, quiet=True)
            found = self._found(result, costs, uses, predicted)
        advised = [candidate for candidate in uses if found.advised and candidate.name == found.advised.name]
        if advised and advised[0].gradwire:
            self._time(DDP_FP32, advised[0])
            found = self._found(result, costs, uses, predicted)
        return found

    def _time(self, *candidates: Candidate, quiet: bool = False) -> None:
        if not quiet:
            again = " again" if candidates[0] in self._trials.timings else ""
            names = [_LABELS.get(candidate.name, candidate.name) for candidate in candidates]
            self.say(f"timing {' and '.join(names)}{again}")
        for candidate in candidates:
            run_steps(self._trials.run(candidate), self._steps.step)

    def _candidates(
        self, level: PlanTable, singles: Sequence[PlanTable]
    ) -> tuple[dict[Candidate, str], dict[str, float]]:
        """Return gradwire's candidates to try, with the line of code for each, and predicted steps of the others."""
        uses: dict[Candidate, str] = {}
        if not level.native:
            specs = " and ".join(sorted({row.spec for row in level.rows} - {"none"}))
            use = f'gw.attach(ddp, "auto", fidelity="{self.fidelity}", optimizer=optimizer)'
            uses[Candidate.of(level, f"gradwire's plan ({specs or 'dense'})")] = use
        tables = {Candidate.of(table, f"gradwire {table.fidelity}"): table for table in singles}
        tables = {each: table for each, table in tables.items() if each.choices != Candidate.of(level).choices}
        named = [each for each, table in tables.items() if table.fidelity in self.extra]
        others = [each for each, table in tables.items() if table.fidelity not in self.extra]
        uses |= {each: _use(tables[each]) for each in named + others[:SINGLE_METHODS]}
        untried = {tables[each].fidelity: tables[each].step for each in others[SINGLE_METHODS:]}
        return uses, untried

    def _found(
        self, result: ProbeFindings, costs: Costs, uses: dict[Candidate, str], predicted: dict[Candidate, float]
    ) -> ProbeFindings:
        """Add what has been timed so far to the result."""
        timings, compute = self._trials.timings, self._trials.timings[SILENT].step
        nbytes = {each: self._sent_bytes(each, result.world_size) for each in uses}
        # A step that is shorter than its bytes at the measured rate shows that the link carries more.
        shown = [timings[each].step / max(1.0, nbytes[each]) for each in uses]
        seconds_per_byte = min(costs.slowest.seconds_per_byte, *shown)
        rows = []
        for each, use in uses.items():
            timing, wire = timings[each], nbytes[each] * seconds_per_byte
            rows.append(Measurement(
                each.name, each.kind, predicted.get(each), timing.step, timing.num_steps, nbytes[each], timing.codec,
                ideal=max(compute, wire), limit=limit_of(timing.step, compute, wire, timing.codec, MIN_GAIN),
                allowed=each.kind != HALF or self.fidelity != "exact", use=use,
            ))  # fmt: skip
        return replace(result, compute=compute, bytes_per_second=1 / seconds_per_byte, rows=tuple(rows))

    def _sent_bytes(self, candidate: Candidate, world_size: int) -> float:
        """Bytes that a rank sends in a step."""
        timing = self._trials.timings[candidate]
        if candidate.gradwire:
            return timing.sent_bytes
        return ring_bytes(timing.nbytes_of_half if candidate.kind == HALF else timing.nbytes, world_size)


def _use(table: PlanTable) -> str:
    """The line of code that comes closest to a plan of one compressor."""
    large = [row for row in table.rows if row.spec != "none"]
    if not large:
        return _attach(f'"{table.fidelity}"')
    partitions = {row.partitions for row in large}
    more = f", partitions={partitions.pop()}" if len(partitions) == 1 and partitions != {table.world_size} else ""
    return _attach(f'gw.Plan("{table.fidelity}", strategy="{large[0].strategy}"{more})')


def _attach(method: str) -> str:
    return f"gw.attach(ddp, {method}, optimizer=optimizer)"
