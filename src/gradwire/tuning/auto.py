"""`auto`: decides while training what the gradients travel by, and never trusts a prediction that it has not tried.

1. *Dense.* Some steps by DDP's own all-reduce, timed.
2. *Survey and plan.* Links, codecs and engine are measured by all ranks; rank 0 plans with these figures and the
   timeline of this model's backward, and tells the others.
3. *Trials.* What is predicted to be faster runs some steps, timed alike. The most faithful of the fastest stays.
4. *Watch.* Every few steps all ranks compare notes. When steps or synchronization have become slower or faster for
   good, links are measured anew and it goes on at 2.

Guarantees: all ranks switch at the same step, since they decide from the same numbers; residuals are given out before
gradients go back to DDP's own all-reduce; each decision is told once, with its numbers (`gradwire.observe.notices`).

Source: HiPress (SOSP 2021), section 3.3, selective compression; trials and watching are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from gradwire.core import torch_private
from gradwire.core.events import Event
from gradwire.core.spec import ElementRange
from gradwire.observe.notices import seldom, tell
from gradwire.planner import PlannedTensor, PlanTable, is_small, plan
from gradwire.planner import fidelity as levels
from gradwire.planner.costs import Costs, LinkCosts
from gradwire.planner.table import seconds
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.calibration import SIZES, Calibration, CalibrationSample
from gradwire.tuning.candidates import GIVE_OUT, NATIVE, NATIVE_FP16, Candidate, Decision, Timing
from gradwire.tuning.step_clock import StepClock, StepTiming

MIN_GAIN = 0.02  # a less faithful way must be faster by so much
MIN_PLAN_GAIN = 0.05  # gradwire's, which also has more that can vary
NATIVE_DOUBT = 1.5  # predictions of DDP's own all-reduce were seen to be a third too long
TIMED_STEPS = 8
TIMED_SECONDS = 3.0  # slow steps: no more of them than this takes
WINDOW = 4  # steps that are compared at a time
STRIKES = 2  # windows out of bounds, one after another, before anything is measured anew
STEP_BOUND = 1.3  # steps, slower or faster by so much
SYNC_BOUND = 2.0  # time between a bucket and its mean
LINK_BOUND = 2.0  # time with frames under way, which tells of the link even where steps do not wait for it
NEW_LINK = 1.25  # a rate that differs by more is another link
_LINK_SHARE = 0.05  # of a step: less time under way than this tells nothing
NO_GAIN = "steps take longer than those of a more faithful way did"
PATIENCE = 64  # strikes at most, where looking again has changed nothing

T = TypeVar("T")
Aux = Callable[[str, ElementRange], Mapping[str, torch.Tensor]]
Script = Generator[None, None, T]
Future = torch.futures.Future[torch.Tensor]


class Autopilot:
    """Chooses the way of an attached module's gradients. One a handle.

    Attributes:
        way: how gradients travel.
        decisions: all of them, the latest last.
        settled: whether it has decided, and watches.

    Args:
        synchronizer: of the module; its plan is replaced.
        group: for DDP's own all-reduce.
        fidelity: see `gradwire.planner.fidelity`.
        min_elements: see `attach`.
        settle: decides the step before, if it can be decided.
        aux: of the parameters' optimizer, by name and range, for gcomp; None where it is not known.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        group: dist.ProcessGroup,
        fidelity: str,
        min_elements: int,
        settle: Callable[[], None],
        aux: Aux | None = None,
    ) -> None:
        self.way = NATIVE
        self.decisions: list[Decision] = []
        self.settled = False
        self._synchronizer = synchronizer
        self._group = group
        self._tensors = synchronizer.tensors
        self._methods = levels.methods(fidelity, optimizer=aux is not None)
        self._aux = aux
        self._fidelity = fidelity
        self._min_elements = min_elements
        self._settle = settle
        self._clock = StepClock(synchronizer.link_busy_seconds)
        self._survey = Calibration(synchronizer, max((spec.numel for spec in self._tensors.values()), default=1))
        self._link = 0.0  # seconds a byte of the slowest one, when it was last found to be another
        self._sample: CalibrationSample | None = None  # of this rank's gradients, for codecs whose work depends on them
        self._num_steps = 0
        self._native: tuple[float, float] | None = None  # seconds a byte of DDP's own all-reduce, and of the link then
        self._notes: np.ndarray | None = None  # figures to send with the next bucket
        self._answers: Callable[[], np.ndarray] | None = None
        self._script = self._fly()

    # -- what the handle calls -------------------------------------------------------------------------------

    def boundary(self) -> None:
        """A backward's first bucket is here: decide what there is to decide, before it travels."""
        self._clock.begin()
        self._num_steps += 1
        self._synchronizer.wait()
        next(self._script)
        self._clock.resume()

    def average(self, bucket: torch_private.GradBucket, names: Iterable[str], submit: Callable[[], Future]) -> Future:
        """Average a bucket the way that is chosen; `submit` is gradwire's."""
        names = tuple(names)
        if self._notes is not None:  # not at the boundary: the step could not begin before all ranks had answered
            self._answers, self._notes = self._survey.post(self._notes), None
        noted = self._clock.ready(names, bucket.buffer().nbytes)
        if self._num_steps == 2 and (self._sample is None or bucket.buffer().numel() > self._sample.grad.numel()):
            # Of the second step: some models' very first gradients are zeros.
            self._sample = self._sampled(bucket, names)
        if self.way.gradwire:
            future = submit()
        else:
            future = self._native_average(bucket)

        def arrived(done: Future) -> torch.Tensor:
            self._clock.done(noted)
            return done.value()

        return future.then(arrived)

    def _native_average(self, bucket: torch_private.GradBucket) -> Future:
        """DDP's own all-reduce, with the events of a tensor of ours: what it sends is computed, as that of a ring."""
        buffer, world_size, events = bucket.buffer(), self._synchronizer.world_size, self._synchronizer.events
        begun, row, ring_bytes = time.monotonic(), f"bucket {bucket.index()}", 2 * (world_size - 1) * buffer.nbytes
        detail = {
            "method": self.way.name, "elements": buffer.numel(),
            "sent_bytes": ring_bytes // world_size // (1 + self.way.half),
        }  # fmt: skip
        events.emit(Event("submit", begun, tensor=row, nbytes=ring_bytes // world_size, detail=detail))

        def arrived(done: Future) -> torch.Tensor:
            events.emit(Event("done", begun, time.monotonic() - begun, row))
            return done.value()

        return (fp16_compress_hook if self.way.half else allreduce_hook)(self._group, bucket).then(arrived)

    def _sampled(self, bucket: torch_private.GradBucket, names: Sequence[str]) -> CalibrationSample:
        """Some of a bucket's gradients, and what gcomp gets with those of its largest tensor."""
        grad = bucket.buffer()[: SIZES[-1]].detach().to("cpu", torch.float32, copy=True)
        name, own = max(zip(names, bucket.gradients(), strict=True), key=lambda pair: pair[1].numel())
        aux = {} if self._aux is None or own.dim() < 2 else self._aux(name, ElementRange(0, own.numel()))
        if not aux:
            return CalibrationSample(grad)
        copied = {key: values.to("cpu", torch.float32, copy=True) for key, values in aux.items()}
        return CalibrationSample(grad, own.detach().reshape(-1).to("cpu", torch.float32, copy=True), copied)

    def restart(self) -> None:
        """Begin at the beginning, and give out residuals that were loaded."""
        self._script, self.settled, self._notes = self._fly(), False, None

    # -- the script: at each `yield` a step passes -----------------------------------------------------------

    def _fly(self) -> Script[None]:
        while self._synchronizer.world_size == 1 or not self._tensors:  # all gradients are sparse
            self.settled = True
            yield
        yield from self._switch(NATIVE)
        timing = yield from self._timed(warm_up=1)
        reason, strikes = "at the start", STRIKES
        while True:
            before, paid = (self.way, self._link), reason != NO_GAIN
            kept, rival = yield from self._decide(reason, timing)
            # Where looking again has found nothing new, the next look takes more.
            looked_in_vain = (self.way, self._link) == before or not paid
            strikes = min(2 * strikes, PATIENCE) if looked_in_vain else STRIKES
            reason, timing = yield from self._watch(kept, strikes, rival)

    def _timed(self, warm_up: int) -> Script[Timing]:
        """Time some steps."""
        steps: list[StepTiming] = []
        spent = 0.0
        while len(steps) < TIMED_STEPS and (not steps or spent < TIMED_SECONDS):
            yield
            step = self._last
            spent += float(self._survey.largest(np.array([step.seconds]))[0])
            warm_up -= 1
            if warm_up < 0:
                steps.append(step)
        return self._timing(steps, self._survey.largest(_figures(steps)))

    def _decide(self, reason: str, timing: Timing) -> Script[tuple[Timing, float]]:
        """Try what is predicted to be faster, and keep the most faithful of the fastest.

        Returns:
            What was timed by the way that is kept, and seconds of a step by the fastest way more faithful than it.
        """
        costs = self._measure(timing)
        table = self._plan(timing, costs)
        predicted = _predict(table, timing, costs, self._methods)
        timings = {self.way: timing}
        for way in sorted(predicted, key=lambda way: (predicted[way], way.name)):
            if way not in timings and _worth_a_trial(way, predicted[way], min(each.step for each in timings.values())):
                yield from self._switch(way)
                timings[way] = yield from self._timed(warm_up=2)
        measured = {way: timing.step for way, timing in timings.items()}
        best = min(measured, key=lambda way: measured[way])
        limit = (1 + (MIN_PLAN_GAIN if best.gradwire else MIN_GAIN)) * measured[best]
        chosen = max((way for way in measured if measured[way] <= limit), key=lambda way: way.faithfulness)
        yield from self._switch(chosen)
        self._note(Decision(self._synchronizer.step + 1, reason, chosen, predicted, measured, table, costs))
        rivals = [step for way, step in measured.items() if way.faithfulness > chosen.faithfulness]
        return timings[chosen], min(rivals, default=math.inf)

    def _watch(self, kept: Timing, strikes: int, rival: float) -> Script[tuple[str, Timing]]:
        """Compare notes, until so many times one after another things are not as they were; then say what changed.

        Args:
            kept: how they were when it was decided.
            strikes: so many times.
            rival: seconds of a step by a more faithful way: what is slower than that pays no more.
        """
        changed, self.settled = 0, True
        while True:
            steps: list[StepTiming] = []
            for _ in range(WINDOW):
                yield
                steps.append(self._last)
            self._notes = _figures(steps)
            yield  # they go, and the answers come, beside this step's gradients
            assert self._answers is not None, "a step has passed"
            timing = self._timing(steps, self._answers())
            reason = _change(kept, timing) or (NO_GAIN if timing.step > (1 + MIN_GAIN) * rival else "")
            changed = changed + 1 if reason else 0
            if reason and changed >= strikes:
                self.settled = False
                return reason, timing

    def _switch(self, way: Candidate) -> Script[None]:
        """Let gradients travel another way from this backward on."""
        if way.gradwire and way != self.way:
            assert way.table is not None, "plans have tables"
            yield from self._replan(Plan.of_entries(way.table.entries()))
        elif not way.gradwire and self._anyone(self._holds_residuals):
            # DDP's own all-reduce knows nothing of residuals: they go first.
            yield from self._replan(Plan("none", min_elements=self._min_elements))
            self.way = GIVE_OUT
            while self._anyone(self._holds_residuals):
                yield
                self._settle()
        self.way = way

    def _replan(self, plan: Plan) -> Script[None]:
        self._settle()
        while self._anyone(self._synchronizer.residuals.is_open):
            yield  # the optimizer has not decided on this step
            self._settle()
        self._synchronizer.replan(plan)

    # -- figures ---------------------------------------------------------------------------------------------

    @property
    def _last(self) -> StepTiming:
        assert self._clock.last is not None, "a step has passed"
        return self._clock.last

    @property
    def _holds_residuals(self) -> bool:
        return any(self._synchronizer.residuals.holds(name) for name in self._tensors)

    def _anyone(self, mine: bool) -> bool:
        return bool(self._survey.largest(np.array([float(mine)]))[0])

    def _timing(self, steps: Sequence[StepTiming], figures: np.ndarray) -> Timing:
        step, rest, busy, synchronizing, link, *ready = figures.tolist()
        buckets = steps[-1].buckets
        names = [bucket.names for bucket in buckets]
        nbytes = sum(bucket.nbytes for bucket in buckets)
        # Beside DDP's own all-reduce there are no frames but those of a trial's figures, which are not there later.
        under_way = link if self.way.gradwire else 0.0
        return Timing(step, rest, busy, synchronizing, under_way, tuple(zip(names, ready)), nbytes)

    def _measure(self, timing: Timing) -> Costs:
        """All ranks' costs; those of DDP's own all-reduce as far as it has been seen."""
        if self._sample is not None:
            self._tell(
                f"auto: a step by {self.way.name} takes {seconds(timing.step)}. Measuring links and codecs; the first "
                "time on a machine codecs are compiled, which may take a minute."
            )
        costs = self._survey.costs(self._specs, self._sample, seldom(lambda text: self._tell(f"auto: {text}")))
        self._sample = None  # codecs are measured once
        rate = costs.slowest.seconds_per_byte
        if not self._link / NEW_LINK < rate < self._link * NEW_LINK:
            self._link = rate
        link, hops = costs.slowest, 2 * (costs.world_size - 1)
        if self.way == NATIVE:
            waiting = min(hops * link.latency * len(timing.buckets), timing.busy / 2)
            own = (timing.busy - waiting) * costs.world_size / (hops * max(1, timing.nbytes))
            self._native = own, link.seconds_per_byte
        if self._native is None:
            return costs
        own, then = self._native
        # What it lost beside the link (processor, small messages) stays; what the link took goes with the link.
        now = max(link.seconds_per_byte, own + link.seconds_per_byte - then)
        return replace(costs, native=LinkCosts(link.latency, now))

    def _plan(self, timing: Timing, costs: Costs) -> PlanTable:
        """Rank 0's plan."""
        ready = {name: at for names, at in timing.buckets for name in names}
        tensors = [
            PlannedTensor(name, spec.shape, spec.dtype, ready.get(name, timing.backward))
            for name, spec in self._tensors.items()
        ]
        text = None
        if self._synchronizer.rank == 0:
            text = plan(
                tensors, costs, fidelity=self._fidelity, min_elements=self._min_elements, rest=timing.rest,
                bucket_bytes=max(1, timing.nbytes // max(1, len(timing.buckets))),
            ).to_json()  # fmt: skip
        return PlanTable.from_json(self._synchronizer.share(text))

    @property
    def _specs(self) -> list[str]:
        """Codecs to measure: of a model that travels in batches, those that a batch may take."""
        batched = all(is_small(spec.shape, self._min_elements) for spec in self._tensors.values())
        return [
            method.spec for method in self._methods if not batched or method.spec in (*levels.CASTS, levels.DENSE.spec)
        ]

    def _note(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self._tell(f"auto: {decision}")

    def _tell(self, text: str) -> None:
        if self._synchronizer.rank == 0:
            tell(text)


def _worth_a_trial(way: Candidate, predicted: float, fastest: float) -> bool:
    """Whether a way may turn out faster than the fastest that was measured; for DDP's own the prediction is in doubt.

    A plan is predicted to be faster than it is more often than not. What is more faithful must not lose against it by
    a prediction alone.
    """
    return predicted < fastest * (1.0 if way.gradwire else NATIVE_DOUBT)


def _figures(steps: Sequence[StepTiming]) -> np.ndarray:
    """float64[5 + B] of the last of the steps and those with as many buckets B."""
    alike = [step for step in steps if len(step.buckets) == len(steps[-1].buckets)]
    rows = [
        [step.seconds, step.rest, step.busy, step.synchronizing, step.link, *(bucket.ready for bucket in step.buckets)]
        for step in alike
    ]
    medians: np.ndarray = np.median(np.array(rows), axis=0)
    return medians


def _predict(
    table: PlanTable, timing: Timing, costs: Costs, methods: Sequence[levels.RankedCompressor]
) -> dict[Candidate, float]:
    """Seconds of a step by each way worth a thought."""
    predicted = {NATIVE: table.native_step}
    if any(method.spec == "fp16" for method in methods):
        hop = costs.native or costs.slowest
        saved = (costs.world_size - 1) * hop.seconds_per_byte * timing.nbytes / costs.world_size
        predicted[NATIVE_FP16] = max(timing.rest + timing.backward, table.native_step - saved)
    if not table.native:
        predicted[Candidate.of(table)] = table.step
    return predicted


def _change(kept: Timing, now: Timing) -> str:
    """What is no longer as it was, as words; empty where nothing is."""
    for what, before, after, bound in (
        ("steps take", kept.step, now.step, STEP_BOUND),
        ("synchronizing takes", kept.synchronizing, now.synchronizing, SYNC_BOUND),
        ("frames are under way for", kept.link, now.link, LINK_BOUND),
    ):
        if what.startswith("frames") and max(before, after) < _LINK_SHARE * now.step:
            continue
        if not before / bound <= after <= before * bound:
            return f"{what} {seconds(after)} after {seconds(before)}"
    return ""
