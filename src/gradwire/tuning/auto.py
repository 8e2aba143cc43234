"""`auto`: decides during training how gradients are averaged, and trusts no prediction without a trial.

1. *Dense.* Some steps by DDP's own all-reduce are timed.
2. *Calibration and plan.* All ranks measure links, codecs and the engine. Rank 0 plans with these figures and the
   timeline of this model's backward pass, and shares the plan.
3. *Trials.* Candidates that are predicted to be faster run some steps. Those that come close to the fastest run again,
   in turns, until it is clear which one to choose. Of the fastest, the one with the highest fidelity stays.
4. *Watch.* Every few steps all ranks compare figures. When steps or synchronization have become slower or faster for
   good, or what is allowed has changed, `auto` goes back to 2. While DDP's own all-reduce is in use, `auto` rests
   between these windows: nothing is timed, and a bucket costs one Python call.

What is allowed depends on the job: fp16 only while gradients fit its range, and what suffers from momentum only while
the optimizer has none.

Guarantees: all ranks switch at the same step, since they decide from the same numbers; residuals are flushed before
gradients go back to DDP's own all-reduce, except what a later plan sends: those of parameters that are not used
meanwhile, and what gradients of 16 bits cannot hold; each decision is reported once, with its numbers (see
`gradwire.observe.notices`).

With momentum correction, each rank applies momentum before its gradient is sent, dense or compressed. DDP's own
all-reduce knows no velocities, so gradwire sends dense gradients itself.

Where a mapping names other methods, too, `auto` decides about the remaining tensors. The entries of the named ones are
part of each plan. DDP's own all-reduce averages whole buckets, so it is a candidate only if the named tensors travel
unchanged.

Source: HiPress (SOSP 2021), section 3.3, selective compression. Trials and watching are ours.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core import torch_private
from gradwire.observe.notices import seldom, tell
from gradwire.planner import PlanTable
from gradwire.planner.costs import Costs
from gradwire.planner.table import seconds
from gradwire.sync.optimizer_view import OptimizerSlices
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.allowed import STATE, Allowed
from gradwire.tuning.calibration import Calibration, CalibrationSample, sampled
from gradwire.tuning.candidates import (
    NATIVE,
    NATIVE_BF16,
    Candidate,
    Future,
    native_step,
    plan_tables,
)
from gradwire.tuning.change import NO_GAIN, START, Reason, change_of
from gradwire.tuning.choice import Decision, choose, fidelity_of, margin, worth_a_trial
from gradwire.tuning.native import NativeAverage
from gradwire.tuning.step_clock import StepClock, StepTiming, Timing, typical
from gradwire.tuning.trials import Script, Trials

FLUSH_RESIDUALS = Candidate("gradwire, flushing residuals", plan=Plan("none"))
CLOSE = 0.25  # share by which a step may be longer than the fastest for its candidate to be timed again
TURNS = range(5, 12)  # of each such candidate, until it is clear which one to choose
TIMED_STEPS = 8
TIMED_SECONDS = 3.0
WINDOW = 4  # steps that are compared at a time
REST_STEPS = range(27, 109)  # fewest and most steps by DDP's own all-reduce between two windows that are compared
REST_SECONDS = 3.0  # of these steps, within that range
RIVAL_BOUND = 1.02  # ratio of a step to that of a candidate of higher fidelity in its trial, which no longer pays
RIVAL_WINDOWS = 8  # of which the median is compared with that bound
STRIKES = 2  # windows out of bounds, less those within, before links are measured again
LASTING = 5.0  # seconds of these windows, likewise, since other work on a machine comes and goes
NEW_LINK = 1.25  # ratio of rates from which on a link counts as another
PATIENCE = 64  # most strikes, after decisions that have changed nothing
PASSES = 32  # most steps to wait for optimizers to step, or for residuals to be sent
LOOKS = 8  # most steps to look for one whose gradients are all finite, as not all are while a GradScaler begins
IN_VAIN = 3  # steps after which residuals have not become less, and are not waited for
RANGE_WINDOWS = 8  # windows from one look at the range of gradients to the next, while none is cast to fp16


class Autopilot:
    """Chooses how the gradients of an attached module are averaged. Each handle has its own.

    Args:
        synchronizer: Synchronizer of the module, whose plan is replaced.
        group: Process group for DDP's own all-reduce.
        fidelity: Level of fidelity; see `gradwire.planner.fidelity`.
        min_elements: See `attach`.
        settle: Commits or rolls back the last step, if that is decided.
        aux: Slices of the parameters' optimizer state by name and range, for gcomp; None where it is not known.
        rules: The user's plan, of which `auto` is a rule; None if it is the only one.
        momentum: Returns whether the optimizer applies momentum, as far as one knows.

    Attributes:
        allowed: What it may choose from.
        current: The candidate that averages gradients now.
        decisions: All decisions, the latest last.
        settled: Whether it has decided, and watches.
        fidelity: See above.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        group: dist.ProcessGroup,
        fidelity: str,
        min_elements: int | None,
        settle: Callable[[], None],
        aux: OptimizerSlices | None = None,
        rules: Plan | None = None,
        momentum: Callable[[], bool] = lambda: True,
    ) -> None:
        self.decisions: list[Decision] = []
        self.settled = False
        self._synchronizer = synchronizer
        self._native = NativeAverage(synchronizer, group)
        self.allowed = Allowed(synchronizer, rules or Plan("auto"), fidelity, aux is not None, momentum)
        self.current = self.allowed.unchosen
        self._aux = aux
        self.fidelity = fidelity
        self._min_elements = min_elements
        self._settle = settle
        # DDP's own all-reduce has no frames but those in which ranks exchange the figures of a trial.
        self._clock = StepClock(lambda: synchronizer.link_busy_seconds() if self.current.gradwire else 0.0)
        self._calibration = Calibration(synchronizer, self.allowed.largest, self.allowed.feedback)
        self._trials = Trials(self, self._calibration.largest, TIMED_STEPS, TIMED_SECONDS)
        self._link = 0.0  # seconds per byte of the slowest link, when it was last found to be another
        self._samples = False  # whether to take samples of this step's gradients
        self._sample: CalibrationSample | None = None  # this rank's gradients
        self._is_queued = False  # see `worth_a_trial`
        self._looks = False  # whether to look at the range of this step's gradients
        self._rest_steps = 0  # still to come
        self._figures: np.ndarray | None = None  # to be sent with the next bucket
        self._answers: Callable[[], np.ndarray] | None = None  # of all ranks to `_figures`
        self._script = self._run()

    # -- what the handle calls -------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Decide what is due, when the first bucket of a backward pass is ready and before it is sent."""
        self._native.begin()
        self._clock.begin()
        self._looks = self._samples = False
        self._synchronizer.wait()
        if self._rest_steps:  # this step would rest, had not the handle something else to do
            self._rest_steps -= 1
        else:
            next(self._script)
        if self._looks:
            self.allowed.begin_look()

    def rests(self) -> bool:
        """Whether this step is DDP's own all-reduce and nothing else. Called at its first bucket."""
        if self._rest_steps == 0:
            return False
        self._rest_steps -= 1
        self._native.rested += 1
        return True

    @property
    def only_compares(self) -> bool:
        """Whether gradwire sends nothing in this step but figures, for which the next step waits."""
        return self._answers is not None and not self.current.gradwire

    def native(self, bucket: torch_private.GradBucket) -> Future:
        """Average a bucket of a step that rests."""
        return self._native.rest(bucket, self.current)

    def count_rested(self) -> None:
        """Emit the events of the steps that rested, so that the report includes them."""
        self._native.count_rested()

    def average(self, bucket: torch_private.GradBucket, names: Iterable[str], submit: Callable[[], Future]) -> Future:
        """Average a bucket by the current candidate. `submit` averages it by gradwire."""
        names = tuple(names)
        if self._figures is not None:  # not at the boundary, where the step would wait until all ranks have answered
            self._answers, self._figures = self._calibration.post(self._figures), None
        self._is_queued |= bucket.buffer().device.type != "cpu"
        timing = self._clock.ready(names, bucket.buffer())
        if self._samples:
            self._sample = sampled(bucket, names, self._aux, self._sample) or self._sample
        if self._looks:
            self.allowed.look(bucket)
        future = submit() if self.current.gradwire else self._native.average(bucket, names, self.current)

        def arrived(done: Future) -> torch.Tensor:
            self._clock.done(timing)
            return done.value()

        return future.then(arrived)

    def restart(self) -> None:
        """Start over, and flush residuals that were loaded."""
        self._script, self.settled = self._run(), False
        self._rest_steps = 0
        self._figures = self._answers = None

    # -- the script: a step passes at each `yield` -----------------------------------------------------------

    def _run(self) -> Script[None]:
        while self._synchronizer.world_size == 1 or not self.allowed.tensors:  # all gradients are sparse
            self.settled = True
            yield
        self.settled = False
        yield from self.switch(self.allowed.unchosen)
        while self._clock.last is None:  # no dense gradient has come
            yield
        timing = yield from self._trials.time(warm_up=1)
        yield from self._go_on(START, timing)

    def _go_on(self, reason: Reason, timing: Timing) -> Script[None]:
        """Decide, and decide again whenever something has changed.

        Args:
            reason: Why it is time to decide.
            timing: Timing of the current candidate.
        """
        strikes = STRIKES
        while True:
            before, paid = (self.current, self._link), reason.kind != "no gain"
            self.allowed.update((yield from self._inspect()))
            if not self.allowed.allows(self.current):
                yield from self.switch(self.allowed.unchosen)
                timing = yield from self._trials.time()
            kept, rival = yield from self._decide(reason, timing)
            # One that has changed nothing, or takes back another, makes the next decision wait longer.
            changed = (self.current, self._link) != before and paid
            strikes = STRIKES if changed else min(2 * strikes, PATIENCE)
            reason, timing = yield from self._watch(kept, strikes, rival)

    def _inspect(self) -> Script[np.ndarray]:
        """Look at the gradients of a step: their range, and samples for codecs. At later ones if not all are finite.

        Returns:
            The largest `Allowed.state` of all ranks.
        """
        self._sample = None
        for _ in range(LOOKS):
            self._looks = self._samples = True
            yield
            state = self._calibration.largest(self.allowed.state())
            if self.allowed.knows_range(state):
                break
        return state

    def _decide(self, reason: Reason, timing: Timing) -> Script[tuple[Timing, float]]:
        """Try what is predicted to be faster, and keep the candidate of the highest fidelity among the fastest.

        Returns:
            The timing of the candidate that is kept, and seconds of a step by the fastest of higher fidelity.
        """
        allowed = self.allowed
        costs = self._calibrate(timing)
        (table,) = plan_tables(
            self._synchronizer, allowed.tensors, timing, costs, allowed.methods, fidelity=self.fidelity,
            min_elements=self._min_elements, native=() if allowed.unchosen.gradwire else ("fp32",),
            feedback=allowed.feedback or "", given=allowed.given,
        )  # fmt: skip
        predicted = self._predict(table, timing, costs)
        self._trials.timings = timings = {self.current: timing}
        for candidate in sorted(predicted, key=lambda each: (predicted[each], each.name)):
            fastest = min(each.step for each in timings.values())
            if candidate in timings:
                continue
            if worth_a_trial(candidate, predicted[candidate], fastest, self._is_queued):
                yield from self._trials.run(candidate)
        yield from self._trials.compare(CLOSE, TURNS, lambda steps: choose(steps, margin))
        measured = {candidate: each.step for candidate, each in timings.items()}
        chosen = choose(measured, margin)
        yield from self.switch(chosen)
        decision = Decision(self._synchronizer.step + 1, reason.text, chosen, predicted, measured, table, costs)
        self.decisions.append(decision)
        self._tell(f"auto: {decision}")
        rivals = [step for candidate, step in measured.items() if fidelity_of(candidate) > fidelity_of(chosen)]
        return timings[chosen], min(rivals, default=math.inf)

    def _watch(self, kept: Timing, strikes: int, rival: float) -> Script[tuple[Reason, Timing]]:
        """Compare figures until they have changed in enough windows.

        Args:
            kept: Timing at the decision.
            strikes: Number of changed windows, less those that are not.
            rival: Seconds of a step by a candidate of higher fidelity, above which the current one no longer pays.

        Returns:
            What has changed, and the new timing.
        """
        changed, lasted, self.settled, windows = 0, 0.0, True, 0
        recent: deque[float] = deque(maxlen=RIVAL_WINDOWS)
        while True:
            if not self.current.gradwire and not changed:
                self._rest_steps = min(max(REST_STEPS[0], round(REST_SECONDS / kept.step)), REST_STEPS[-1])
                yield  # of the step after these
            if self.current.casts_to_fp16 or windows % RANGE_WINDOWS == 0:
                self._looks = True
                yield  # of a step that is not timed, since looking takes time
            steps: list[StepTiming] = []
            for _ in range(WINDOW):
                yield
                steps.append(self.last)
            self._figures = np.concatenate([self.allowed.state(), typical(steps)])
            windows += 1
            yield  # they are sent, and the answers arrive, together with this step's gradients
            answers, self._answers, self._figures = self._answers, None, None
            if answers is None:
                continue  # that step had no dense bucket
            state, figures = np.split(answers(), [STATE])
            timing = Timing.of(steps, figures)
            if (reason := self.allowed.change(state, self.current)) is not None:
                self.settled = False
                return reason, timing
            recent.append(timing.step)
            no_gain = len(recent) == RIVAL_WINDOWS and statistics.median(recent) > RIVAL_BOUND * rival
            reason = change_of(kept, timing) or (NO_GAIN if no_gain else None)
            sign = 1 if reason else -1  # other work may hide a change in some of the windows
            changed, lasted = max(0, changed + sign), max(0.0, lasted + sign * len(steps) * timing.step)
            if reason is not None and changed >= strikes and lasted >= LASTING:  # the same on all ranks
                self.settled = False
                return reason, timing

    @property
    def last(self) -> StepTiming:
        """The step that has passed."""
        assert self._clock.last is not None, "a step has passed"
        return self._clock.last

    def switch(self, candidate: Candidate) -> Script[None]:
        """Average gradients by another candidate from this backward pass on."""
        if candidate.plan is not None and candidate != self.current:
            yield from self._replan(candidate.plan)
        elif candidate.plan is None and self._any_rank_holds():
            # DDP's own all-reduce does not apply residuals.
            yield from self._replan(Plan("none", min_elements=self._min_elements))
            self.current = FLUSH_RESIDUALS
            yield from self._flush()
        self.current = candidate

    def _replan(self, plan: Plan) -> Script[None]:
        self._settle()
        yield from self._passes_while(lambda: self._any_rank(self._synchronizer.residuals.is_open))
        if self._synchronizer.residuals.is_open:
            self._synchronizer.commit()  # an optimizer does not step
        self._synchronizer.replan(plan)

    def _flush(self) -> Script[None]:
        """Let steps pass until residuals are sent, or none of what is left is."""
        left, in_vain = self._held(), 0
        for _ in range(PASSES):
            if not left or in_vain == IN_VAIN:
                return
            yield
            self._settle()
            if not self._any_rank(self._synchronizer.residuals.is_open):
                before, left = left, self._held()
                in_vain = 0 if left < before / 2 else in_vain + 1

    def _held(self) -> float:
        """2-norm of what a rank holds of residuals, the largest of all ranks."""
        if not self._any_rank_holds():
            return 0.0
        norms = [norm for roles in self._synchronizer.residuals.norms().values() for norm in roles.values()]
        return float(self._calibration.largest(np.array([math.hypot(*norms)]))[0])

    def _passes_while(self, goes_on: Callable[[], bool]) -> Script[None]:
        """Let steps pass while optimizers have not decided on them. All ranks count the same."""
        for _ in range(PASSES):
            if not goes_on():
                return
            yield
            self._settle()

    def _any_rank_holds(self) -> bool:
        """Whether any rank holds residuals. Those of a parameter that is not used stay until a plan sends them."""
        residuals = self._synchronizer.residuals
        return self._any_rank(any(residuals.holds_after_pruning(name) for name in self._synchronizer.tensors))

    def _any_rank(self, mine: bool) -> bool:
        return bool(self._calibration.largest(np.array([float(mine)]))[0])

    def _predict(self, table: PlanTable, timing: Timing, costs: Costs) -> dict[Candidate, float]:
        """Predict seconds of a step by each candidate."""
        allowed, unchosen = self.allowed, self.allowed.unchosen
        predicted = {unchosen: native_step(timing, costs) if unchosen == NATIVE else table.dense_step}
        for half in allowed.native_halves if timing.nbytes_of_half < timing.nbytes else ():
            if half != NATIVE_BF16 or self._native.has_bf16:
                predicted[half] = native_step(timing, costs, half.hook)
        if table.compresses or (unchosen == NATIVE and not table.native):
            predicted[Candidate.of(table, given=allowed.given, later=allowed.undecided)] = table.step
        return predicted

    # -- costs -----------------------------------------------------------------------------------------------

    def _calibrate(self, timing: Timing) -> Costs:
        if not self.decisions:
            self._tell(
                f"auto: a step by {self.current.name} takes {seconds(timing.step)}. Measuring links and codecs; the "
                "first time on a machine codecs are compiled, which may take a minute."
            )
        self._calibration.cover(self.allowed.largest)
        costs = self._calibration.costs(
            self.allowed.to_measure(self._min_elements), self._sample, seldom(lambda text: self._tell(f"auto: {text}")),
            native=timing if self.current == NATIVE else None,
        )  # fmt: skip
        self._sample = None
        rate = costs.slowest.seconds_per_byte
        if not self._link / NEW_LINK < rate < self._link * NEW_LINK:
            self._link = rate
        return costs

    def _tell(self, text: str) -> None:
        if self._synchronizer.rank == 0:
            tell(text)
