"""The training benchmark: methods trained one after another on the same data, and what their steps cost.

All methods run inside one set of rank processes, each from the same seed. A loss curve is trained on links as they
are; then the links are shaped and a few more steps of the same training are timed (3LC, section 5.2, does so). The
step without communication, of which ideal steps are made, is timed in the same processes, before and after all else.
Without rights for the lab the steps run on loopback, and step times at a rate are predicted and marked as such.
"""
# Shapes: S = steps of the loss curve, W = ranks

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradwire.bench import methods
from gradwire.bench.environment import environment
from gradwire.bench.job import BenchmarkJob, Message, Progress, Segment, SegmentOutcome
from gradwire.bench.launch import Beside, launch
from gradwire.bench.results import MethodResult, TrainingResult, combine_losses, combine_times
from gradwire.bench.statistics import Spread, across_ranks
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError

OnProgress = Callable[[Segment, Progress], None]

_SILENT_STEPS = 15
_TUNING_STEPS = 2


@dataclass(frozen=True)
class TrainingOptions:
    """What to run.

    Attributes:
        workload: name of the workload.
        methods: names, as `methods.parse` takes them; DDP fp32 first makes it the baseline.
        ranks: W.
        rates: of the links, both ways, as tc writes them.
        steps: S.
        train_rate: of the links while these S steps are taken; None for links as they are, which is sooner done.
        validate_every: validate after every so many steps, too; 0 for only after the last.
        timed_seconds: about how long to time each method at each rate.
        buckets_mb: bucket sizes to try for DDP's own methods, the better one of which counts. The first is
            everybody else's.
        seed: of model and data.
        lab: whether to shape links; None for where it can be done.
        deadline_seconds: the whole run ends with an error after so long.
        replay: replay a recorded backward in place of computing.
    """

    workload: str = "text"
    methods: Sequence[str] = methods.DEFAULT_METHODS
    ranks: int = 4
    rates: Sequence[str | None] = ("100mbit",)
    steps: int = 150
    train_rate: str | None = None
    validate_every: int = 0
    timed_seconds: float = 4.0
    buckets_mb: Sequence[float] = (4.0, 25.0)
    seed: int = 0
    lab: bool | None = None
    deadline_seconds: float = 900.0
    replay: bool = False

    def check(self) -> None:
        """Refuse what cannot be run, before anything starts.

        Raises:
            OptionError, UnknownNameError: with what to do.
        """
        from gradwire.lab.units import parse_rate

        methods.check(list(self.methods))
        make_workload(self.workload)  # a rank's traceback would hide what it says
        for rate in (*self.rates, self.train_rate):
            parse_rate(rate)
        limits = (
            ("ranks", self.ranks, 2),
            ("steps", self.steps, 0 if self.replay else 1),
            ("methods", len(self.methods), 1),
            ("rates", len(self.rates), 1),
            ("bucket sizes", len(self.buckets_mb), 1),
        )
        for name, number, least in limits:
            if number < least:
                raise OptionError(f"Expected {name} of at least {least}, got {number}. Do: give at least {least}.")
        if min(self.buckets_mb) <= 0:
            raise OptionError(f"A bucket cannot have {min(self.buckets_mb):g} MB. Give sizes above 0.")


@dataclass(frozen=True)
class TrainingPlan:
    """The segments of a job, and which of them are of which method."""

    segments: list[Segment] = field(default_factory=list)

    @classmethod
    def of(cls, options: TrainingOptions) -> TrainingPlan:
        """A segment a method and bucket size; the step without communication at both ends."""
        rates = tuple(options.rates)
        silent = Segment(methods.SILENT, options.buckets_mb[0], min_timed=_SILENT_STEPS, max_timed=_SILENT_STEPS)
        segments = [silent]
        for method in options.methods:
            first = Segment(
                method,
                options.buckets_mb[0],
                train_steps=options.steps,
                train_rate=options.train_rate,
                validate_every=options.validate_every,
                timed_seconds=options.timed_seconds,
                rates=rates,
            )
            segments.append(first)
            if methods.tries_buckets(method):
                segments += [
                    replace(first, bucket_mb=size, train_steps=0, min_timed=_TUNING_STEPS)
                    for size in options.buckets_mb[1:]
                ]
        return cls([*segments, silent])


def run(
    options: TrainingOptions,
    on_progress: OnProgress = lambda segment, progress: None,
    beside: Beside | None = None,
) -> TrainingResult:
    """Run the benchmark.

    Args:
        options: what to run.
        on_progress: called with the segment and how far it is.
        beside: what runs beside the ranks, such as a server that a method needs.

    Raises:
        OptionError, UnknownNameError: an option does not fit.
        RightsError: `options.lab` is True and the lab cannot run here.
        RanksError: a rank failed or the deadline was reached.
    """
    options.check()
    lab, note = _use_lab(options)
    started = time.monotonic()
    plan = TrainingPlan.of(options)

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            on_progress(plan.segments[message.segment], message)

    job = BenchmarkJob(
        options.workload,
        tuple(plan.segments),
        folder="",
        seed=options.seed,
        deadline_seconds=options.deadline_seconds,
        replay=options.replay,
    )
    outcomes = launch(job, options.ranks, on_message, lab=lab, beside=beside)
    return _result(options, plan, outcomes, lab, note, time.monotonic() - started)


def _use_lab(options: TrainingOptions) -> tuple[bool, str]:
    """Whether to run in the lab, and what to tell the reader if not."""
    from gradwire.lab import available

    if options.lab is False:
        return False, "Links were not shaped, as asked for: step times at a rate are predicted."
    reason = available()
    if reason is None or options.lab:
        return True, ""
    return False, f"Links were not shaped: step times at a rate are predicted. {reason}"


def _result(
    options: TrainingOptions, plan: TrainingPlan, outcomes: list[SegmentOutcome], lab: bool, note: str, seconds: float
) -> TrainingResult:
    by_segment = [
        sorted((outcome for outcome in outcomes if outcome.segment == index), key=lambda outcome: outcome.rank)
        for index in range(len(plan.segments))
    ]
    compute = _compute_seconds(plan, by_segment)
    workload = make_workload(options.workload)
    return TrainingResult(
        workload=workload.summary,
        num_parameters=sum(parameter.numel() for parameter in workload.model().parameters()),
        ranks=options.ranks,
        batch_size=workload.batch_size,
        train_steps=options.steps,
        rates=list(options.rates),
        shaped=lab,
        replayed=options.replay,
        seconds=seconds,
        environment=environment(),
        note=note,
        results=[_method(method, plan, by_segment, compute, lab) for method in options.methods],
    )


def _compute_seconds(plan: TrainingPlan, by_segment: list[list[SegmentOutcome]]) -> float:
    """The median step without communication, of all ranks and both times it was run."""
    return Spread.of(
        [
            seconds
            for segment, outcomes in zip(plan.segments, by_segment, strict=True)
            if segment.method == methods.SILENT
            for outcome in outcomes
            for timed in outcome.timed
            for seconds in timed.seconds
        ]
    ).median


def _method(
    method: str, plan: TrainingPlan, by_segment: list[list[SegmentOutcome]], compute: float, measured: bool
) -> MethodResult:
    outcomes_tried, times_tried = [], []
    for segment, outcomes in zip(plan.segments, by_segment, strict=True):
        if segment.method == method:
            by_rate = zip(*(outcome.timed for outcome in outcomes), strict=True)
            outcomes_tried.append(outcomes)
            times_tried.append([combine_times(ranks, compute, measured, segment.bucket_mb) for ranks in by_rate])
    # The loss curve is that of the first bucket size; buckets do not change what is learned.
    first = outcomes_tried[0]
    return MethodResult(
        method=method,
        losses=combine_losses(first),
        validation_loss=first[0].validation_loss,
        validation_accuracy=first[0].validation_accuracy,
        identical=all(outcome.identical is not False for outcome in first),
        times=[min(tried, key=lambda time: time.step.median) for tried in zip(*times_tried, strict=True)],
        train_seconds=across_ranks([outcome.train_seconds for outcome in first]),
        validations=first[0].validations,
    )
