"""What ranks are told to do, and what they say: the job file and the lines on standard output.

The parent writes one JSON file; each rank reads it, and prints one JSON object a line. Ranks run all segments one
after another inside one job, which spares a start-up for each method.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Segment:
    """One method, trained from the same seed as all others, in a job.

    Attributes:
        method: name, as `methods.parse` takes it.
        bucket_mb: DDP's `bucket_cap_mb`.
        train_steps: steps for the loss curve, followed by a validation where there are any.
        train_rate: of the links in these; None for links as they are.
        validate_every: validate after every so many of these steps, too; 0 for only after the last.
        timed_seconds: about how long the timed steps of each rate shall take.
        min_timed: fewest timed steps; 0 for none at all.
        max_timed: most timed steps.
        rates: rates of the links for the timed steps, one after another; None for links as they are.
    """

    method: str
    bucket_mb: float = 25.0
    train_steps: int = 0
    train_rate: str | None = None
    validate_every: int = 0
    timed_seconds: float = 4.0
    min_timed: int = 5
    max_timed: int = 30
    rates: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class BenchmarkJob:
    """What one set of ranks does.

    Attributes:
        workload: name of the workload.
        segments: what to run, in order.
        seed: seed of model and data.
        folder: shared by parent and ranks; where the parent answers.
        shaped: whether the ranks ask the parent for rates. Otherwise rates only say what is to be predicted.
        deadline_seconds: a rank ends itself after so long, whatever happens.
        init_method: as `torch.distributed.init_process_group` takes it.
        replay: segments replay a recorded backward, and do not train.
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
        """Write the job to its folder; returns the file."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> BenchmarkJob:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text())
        segments = tuple(Segment(**{**segment, "rates": tuple(segment["rates"])}) for segment in fields.pop("segments"))
        return cls(**fields, segments=segments)


@dataclass(frozen=True)
class TimedSteps:
    """The timed steps of one rank at one rate. Byte counts are those of all timed steps together.

    Attributes:
        rate: of the links.
        seconds: of each step.
        sent_bytes: counted by gradwire, or computed for DDP's own all-reduce.
        dense_bytes: what a ring all-reduce of fp32 gradients would have sent.
        encode_seconds: encodes and merges, together.
        decode_seconds: decodes, together.
        interface_bytes: bytes sent as the interface counted them, or None where nothing counts.
        interface_packets: packets sent, or None.
        processor_seconds: of all threads of the rank, all timed steps together.
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


@dataclass(frozen=True)
class SegmentOutcome:
    """What one rank has to say of one segment.

    Attributes:
        segment: its index in the job.
        rank: who says it.
        losses: training loss of each step, on this rank's batches.
        train_seconds: of each of these steps.
        validation_loss: mean over the validation set, all ranks together; None without a loss curve.
        validation_accuracy: fraction of right predictions.
        identical: whether all ranks ended the segment with the same bits.
        timed: one entry a rate.
        validations: step, validation loss and accuracy, as often as asked for.
    """

    segment: int
    rank: int
    losses: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    identical: bool | None = None
    timed: list[TimedSteps] = field(default_factory=list)
    validations: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SegmentOutcome:
        """From the plain data of `asdict`."""
        timed = [TimedSteps(**timed) for timed in fields["timed"]]
        validations = [(step, loss, accuracy) for step, loss, accuracy in fields["validations"]]
        return cls(**{**fields, "timed": timed, "validations": validations})


@dataclass(frozen=True)
class Progress:
    """Where rank 0 is.

    Attributes:
        segment: index of the segment.
        phase: ``"train"`` or ``"timed"``.
        step: steps done of the phase.
        steps: steps of the phase in all.
        rate: rate of the links in a timed phase.
        loss: of the latest step.
    """

    segment: int
    phase: str
    step: int
    steps: int
    rate: str | None = None
    loss: float | None = None


@dataclass(frozen=True)
class RateRequest:
    """All ranks wait until the links have this rate: until the parent has made the file `rate-TICKET`."""

    ticket: int
    rate: str | None


Message = SegmentOutcome | Progress | RateRequest
_KINDS: dict[str, Callable[..., Message]] = {
    "outcome": lambda **fields: SegmentOutcome.from_dict(fields),
    "progress": Progress,
    "rate": RateRequest,
}
_NAMES = {SegmentOutcome: "outcome", Progress: "progress", RateRequest: "rate"}


def to_line(message: Message) -> str:
    """One line of JSON, without its end."""
    return json.dumps({"gradwire": _NAMES[type(message)], **asdict(message)})


def from_line(line: str) -> Message | None:
    """What a rank said, or None for a line of anything else."""
    if not line.startswith('{"gradwire"'):
        return None
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("gradwire")](**fields)
    except (ValueError, KeyError, TypeError):
        return None
