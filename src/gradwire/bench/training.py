"""The training benchmark: methods train one after another on the same data, and their steps are timed.

All methods run in the same rank processes and from the same seed. The loss curve is trained on links as they are, that
of ``auto`` at the first rate. Then the links are shaped, and more steps of the same training are timed, as in 3LC,
section 5.2. The step without communication, from which ideal steps follow, is timed in the same processes at the
beginning and at the end. Without the rights for the lab, steps run on loopback, and step times at a rate are predicted
and marked as such.
"""
# Shapes: S = steps of the loss curve, W = ranks

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradwire.bench import methods
from gradwire.bench.environment import environment
from gradwire.bench.job import BenchmarkJob, Message, Progress, Segment, SegmentOutcome
from gradwire.bench.launch import ServerProcess, launch
from gradwire.bench.results import MethodResult, TrainingResult, combine_times
from gradwire.bench.statistics import Spread, across_ranks
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError

OnProgress = Callable[[Segment, Progress], None]

_SILENT_STEPS = 15
_TUNING_STEPS = 2


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training benchmark.

    Attributes:
        workload: Name of the workload.
        methods: Names of the methods, see `gradwire.bench.methods`. DDP fp32 is the baseline.
        ranks: W.
        rates: Rates of the links in both directions, in tc's notation.
        steps: S.
        train_rate: Rate of the links during these S steps. Default: links as they are, which is faster. For ``auto``,
            the first of `rates`: what it chooses depends on the rate, and so do its losses.
        validate_every: Interval of further validations, in steps; 0 for none.
        timed_seconds: Approximate duration of the timed steps of each method at each rate.
        min_timed: Minimum number of timed steps.
        buckets_mb: Bucket sizes to try for DDP's own methods, of which the best counts. Other methods use the first.
        seed: Seed of model and data.
        lab: Whether to shape links. Default: if it is possible.
        deadline_seconds: Time limit of the whole run.
        replay: Whether to replay a recorded backward pass instead of computing.
    """

    workload: str = "text"
    methods: Sequence[str] = methods.DEFAULT_METHODS
    ranks: int = 4
    rates: Sequence[str | None] = ("100mbit",)
    steps: int = 150
    train_rate: str | None = None
    validate_every: int = 0
    timed_seconds: float = 4.0
    min_timed: int = 5
    buckets_mb: Sequence[float] = (4.0, 25.0)
    seed: int = 0
    lab: bool | None = None
    deadline_seconds: float = 900.0
    replay: bool = False

    def check(self) -> None:
        """Check the options before anything starts.

        Raises:
            OptionError, UnknownNameError: An option is invalid.
        """
        from gradwire.lab.units import parse_rate

        methods.check(list(self.methods))
        make_workload(self.workload)  # an error on a rank would be buried in its traceback
        for rate in (*self.rates, self.train_rate):
            parse_rate(rate)
        limits = (
            ("ranks", self.ranks, 2),
            ("steps", self.steps, 0 if self.replay else 1),
            ("methods", len(self.methods), 1),
            ("rates", len(self.rates), 1),
            ("bucket sizes", len(self.buckets_mb), 1),
        )
        if methods.SILENT in self.methods:
            raise OptionError(f"{methods.SILENT} is timed in every run. Leave it out of the methods.")
        for name, number, least in limits:
            if number < least:
                raise OptionError(f"The number of {name} must be at least {least}, got {number}.")
        for method in self.methods if self.replay else ():
            if methods.needs_optimizer(method):
                raise OptionError(
                    f"{method} cuts gradients by parameters and learning rate, which are 0 in a replay. Time it "
                    "without --replay."
                )
        if min(self.buckets_mb) <= 0:
            raise OptionError(f"A bucket cannot have {min(self.buckets_mb):g} MB. Give sizes above 0.")


def segments_of(options: TrainingOptions) -> list[Segment]:
    """One segment for each method and bucket size; the step without communication at both ends."""
    silent = Segment(methods.SILENT, options.buckets_mb[0], min_timed=_SILENT_STEPS, max_timed=_SILENT_STEPS)
    segments = [silent]
    for method in options.methods:
        size, *more = methods.bucket_sizes(method, options.buckets_mb)
        first = Segment(
            method,
            size,
            train_steps=options.steps,
            train_rate=options.train_rate or (options.rates[0] if methods.is_auto(method) else None),
            validate_every=options.validate_every,
            timed_seconds=options.timed_seconds,
            min_timed=options.min_timed,
            rates=tuple(options.rates),
        )
        segments.append(first)
        segments += [replace(first, bucket_mb=other, train_steps=0, min_timed=_TUNING_STEPS) for other in more]
    return [*segments, silent]


def run(
    options: TrainingOptions,
    on_progress: OnProgress = lambda segment, progress: None,
    server: ServerProcess | None = None,
) -> TrainingResult:
    """Run the benchmark.

    Args:
        options: Options.
        on_progress: Called with the current segment and its progress.
        server: Server that a method needs.

    Raises:
        OptionError, UnknownNameError: An option is invalid.
        RightsError: `options.lab` is True, and the lab cannot run here.
        RanksError: A rank failed, or the deadline passed.
    """
    options.check()
    lab, note = _use_lab(options)
    started = time.monotonic()
    segments = segments_of(options)

    def on_message(message: Message) -> None:
        if isinstance(message, Progress):
            on_progress(segments[message.segment], message)

    job = BenchmarkJob(
        options.workload,
        tuple(segments),
        folder="",
        seed=options.seed,
        deadline_seconds=options.deadline_seconds,
        replay=options.replay,
    )
    outcomes = launch(job, options.ranks, on_message, lab=lab, server=server)
    return _result(options, segments, outcomes, lab, note, time.monotonic() - started)


def _use_lab(options: TrainingOptions) -> tuple[bool, str]:
    """Whether to run in the lab, and a note for the reader if not."""
    from gradwire.lab import available

    if options.lab is False:
        return False, "Links were not shaped, as requested: step times at a rate are predicted."
    reason = available()
    if reason is None or options.lab:
        return True, ""
    return False, f"Links were not shaped: step times at a rate are predicted. {reason}"


def _result(
    options: TrainingOptions,
    segments: list[Segment],
    outcomes: list[SegmentOutcome],
    lab: bool,
    note: str,
    seconds: float,
) -> TrainingResult:
    by_segment = [
        sorted((outcome for outcome in outcomes if outcome.segment == index), key=lambda outcome: outcome.rank)
        for index in range(len(segments))
    ]
    compute = _compute_seconds(segments, by_segment)
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
        results=[_method(method, segments, by_segment, compute, lab) for method in options.methods],
    )


def _compute_seconds(segments: list[Segment], by_segment: list[list[SegmentOutcome]]) -> float:
    """The median step without communication, over all ranks and both segments."""
    return Spread.of(
        [
            seconds
            for segment, outcomes in zip(segments, by_segment, strict=True)
            if segment.method == methods.SILENT
            for outcome in outcomes
            for timed in outcome.timed
            for seconds in timed.seconds
        ]
    ).median


def _method(
    method: str, segments: list[Segment], by_segment: list[list[SegmentOutcome]], compute: float, measured: bool
) -> MethodResult:
    outcomes_tried, times_tried = [], []
    for segment, outcomes in zip(segments, by_segment, strict=True):
        if segment.method == method:
            by_rate = zip(*(outcome.timed for outcome in outcomes), strict=True)
            outcomes_tried.append(outcomes)
            times_tried.append([combine_times(ranks, compute, measured, segment.bucket_mb) for ranks in by_rate])
    # The loss curve is that of the first bucket size. Bucket sizes do not affect losses.
    first = outcomes_tried[0]
    return MethodResult(
        method=method,
        losses=across_ranks([outcome.losses for outcome in first]),
        validation_loss=first[0].validation_loss,
        validation_accuracy=first[0].validation_accuracy,
        identical=all(outcome.identical is not False for outcomes in outcomes_tried for outcome in outcomes),
        times=[min(tried, key=lambda time: time.step.median) for tried in zip(*times_tried, strict=True)],
        train_seconds=across_ranks([outcome.train_seconds for outcome in first]),
        validations=first[0].validations,
    )
