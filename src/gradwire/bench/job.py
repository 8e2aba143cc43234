"""The protocol between a benchmark and its ranks: the job file, and messages on standard output.

The parent writes one JSON file, which each rank reads. Ranks print one JSON object per line. One job runs all segments
one after another, so that the ranks start only once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Segment:
    """One method in a job. All methods train from the same seed.

    Attributes:
        method: Name of the method, see `gradwire.bench.methods`.
        bucket_mb: DDP's `bucket_cap_mb`.
        train_steps: Steps of the loss curve. If there are any, a validation follows.
        train_rate: Rate of the links during these steps; None for links as they are.
        validate_every: Interval of further validations, in steps; 0 for none.
        timed_seconds: Approximate duration of the timed steps at each rate.
        min_timed: Minimum number of timed steps; 0 for no timed steps at all.
        max_timed: Maximum number of timed steps.
        rates: Rates of the links for the timed steps, one after another; None for links as they are.
    """

    method: str
    bucket_mb: float = 25.0
    train_steps: int = 0
    train_rate: str | None = None
    validate_every: int = 0
    timed_seconds: float = 4.0
    min_timed: int = 5
    max_timed: int = 100
    rates: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class BenchmarkJob:
    """The task of one set of ranks.

    Attributes:
        workload: Name of the workload.
        segments: Segments to run, in order.
        folder: Folder shared by parent and ranks, where the parent answers.
        seed: Seed of model and data.
        shaped: Whether the ranks ask the parent to shape links. If not, rates are only predicted for.
        deadline_seconds: Time after which a rank ends itself.
        init_method: Argument of `torch.distributed.init_process_group`.
        replay: Whether to replay a recorded backward pass instead of training.
    """

    workload: str
    segments: tuple[Segment, ...]
    folder: str
    seed: int = 0
    shaped: bool = False
    deadline_seconds: float = 600.0
    init_method: str = "env://"
    replay: bool = False

    def save(self) -> Path:
        """Write the job to its folder; return the file."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> BenchmarkJob:
        """Read a file written by `save`."""
        fields = json.loads(path.read_text())
        segments = tuple(Segment(**{**segment, "rates": tuple(segment["rates"])}) for segment in fields.pop("segments"))
        return cls(**fields, segments=segments)


@dataclass(frozen=True)
class TimedSteps:
    """The timed steps of one rank at one rate. All figures except `seconds` are totals.

    Attributes:
        rate: Rate of the links.
        seconds: Duration of each step.
        sent_bytes: Bytes sent, counted by gradwire or computed for DDP's own all-reduce.
        dense_bytes: Bytes that a ring all-reduce of fp32 gradients would have sent.
        encode_seconds: Time in encodes and merges.
        decode_seconds: Time in decodes.
        interface_bytes: Bytes sent according to the network interface, or None outside of the lab.
        interface_packets: Packets sent according to the network interface, or None.
        processor_seconds: Processor time of all threads.
        settled: What ``auto`` had settled on; see `gradwire.bench.methods.ConnectedMethod.settle`.
        settling_seconds: Time that it took until then, with kernels compiled.
    """

    rate: str | None
    seconds: list[float]
    sent_bytes: int
    dense_bytes: int
    encode_seconds: float
    decode_seconds: float
    interface_bytes: int | None = None
    interface_packets: int | None = None
    processor_seconds: float = 0.0
    settled: str | None = None
    settling_seconds: float = 0.0


@dataclass(frozen=True)
class SegmentOutcome:
    """Result of one segment on one rank.

    Attributes:
        segment: Index of the segment.
        rank: This rank.
        losses: Training loss of each step, on this rank's batches.
        train_seconds: Duration of each of these steps.
        train_bytes: Bytes sent in these steps, counted as those of `TimedSteps`.
        validation_loss: Mean over the validation set of all ranks; None without a loss curve.
        validation_accuracy: Fraction of correct predictions.
        identical: Whether all ranks ended the segment with the same bits.
        timed: Timed steps at each rate.
        validations: Step, validation loss and accuracy of each further validation.
    """

    segment: int
    rank: int
    losses: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)
    train_bytes: int = 0
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    identical: bool | None = None
    timed: list[TimedSteps] = field(default_factory=list)
    validations: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """Progress of rank 0.

    Attributes:
        segment: Index of the segment.
        phase: ``"train"`` or ``"timed"``.
        step: Steps done in this phase.
        steps: Steps of this phase.
        rate: Rate of the links in a timed phase.
        loss: Loss of the last step.
    """

    segment: int
    phase: str
    step: int
    steps: int
    rate: str | None = None
    loss: float | None = None


@dataclass(frozen=True)
class RateRequest:
    """Request to set the rate of the links. Ranks wait until the parent has created the file `rate-TICKET`."""

    ticket: int
    rate: str | None


Message = SegmentOutcome | Progress | RateRequest
_KINDS: dict[str, Callable[..., Message]] = {
    "outcome": lambda timed, validations, **fields: SegmentOutcome(
        **fields, timed=[TimedSteps(**each) for each in timed], validations=[tuple(each) for each in validations]
    ),
    "progress": Progress,
    "rate": RateRequest,
}
_NAMES = {SegmentOutcome: "outcome", Progress: "progress", RateRequest: "rate"}


def to_line(message: Message) -> str:
    """A message as one line of JSON, without a newline."""
    return json.dumps({"gradwire": _NAMES[type(message)], **asdict(message)})


def from_line(line: str) -> Message | None:
    """The message in a line, or None if the line is anything else."""
    if not line.startswith('{"gradwire"'):
        return None
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("gradwire")](**fields)
    except (ValueError, KeyError, TypeError):
        return None
