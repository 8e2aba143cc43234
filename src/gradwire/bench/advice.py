"""What `gradwire probe` found, as plain data, and the sentence that it comes to.

A candidate is advised only if it makes the step shorter by `MIN_GAIN` than those of higher fidelity: DDP's fp32
all-reduce, then its 16-bit hooks, then gradwire. No step is shorter than one without communication. Where one was, by
more than `NOISE`, the timings are too noisy for advice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.planner.table import seconds
from gradwire.tuning.candidates import FP32, GRADWIRE, HALF
from gradwire.tuning.choice import choose

MIN_GAIN = 0.05  # share of a step: medians of a few steps are no more accurate than this
NOISE = 0.05  # share of a step without communication, for the same reason
_LIMITS = {
    "backward": "the computation of forward and backward",
    "link": "the link",
    "codec": "the codec",
    "latency": "latency: messages, tasks and waiting for other ranks",
}


@dataclass(frozen=True)
class Measurement:
    """A candidate that was timed. Times are seconds of a step; of all ranks the largest.

    Attributes:
        name: Name for people.
        kind: ``"fp32"`` (nothing is rounded), ``"half"`` (16-bit hooks of DDP) or ``"gradwire"`` (it compresses).
        predicted: Prediction from links, codecs and the timeline of backward; None if no model covers it.
        step: Mean of the measured steps of the slowest rank, without outliers.
        steps: Number of steps that were timed.
        nbytes: Bytes that a rank sends in a step.
        codec: Time in which a rank encodes and decodes.
        ideal: The larger of the step without communication and the bytes over the link's rate. The rate is at least
            what a step has shown.
        limit: What the step waits for: ``"backward"``, ``"link"``, ``"codec"`` or ``"latency"``.
        allowed: Whether the level of fidelity allows it.
        use: Line of code that chooses it.
    """

    name: str
    kind: str
    predicted: float | None
    step: float
    steps: int
    nbytes: float
    codec: float
    ideal: float
    limit: str
    allowed: bool
    use: str


@dataclass(frozen=True)
class ProbeFindings:
    """The figures of one job. Times are in seconds.

    Attributes:
        name: Name of the model.
        world_size: Number of ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        num_parameters: Number of trained parameters.
        num_tensors: Number of trained tensors.
        fidelity: Level of fidelity that the user allows.
        compute: Step without communication.
        backward: Time from the first bucket to the last in such a step.
        bytes_per_second: Rate of the slowest link; 0 if there is none.
        latency: Latency of the slowest link.
        rows: Candidates that were timed, DDP's own all-reduce first. Empty on one rank.
        untried: Predicted steps of those that were not timed.
    """

    name: str
    world_size: int
    backend: str
    num_parameters: int
    num_tensors: int
    fidelity: str
    compute: float
    backward: float
    bytes_per_second: float = 0.0
    latency: float = 0.0
    rows: tuple[Measurement, ...] = ()
    untried: dict[str, float] = field(default_factory=dict)

    @property
    def too_noisy(self) -> bool:
        """Whether a step was shorter than one without communication, so that no figure supports advice."""
        return any(row.step < (1 - NOISE) * self.compute for row in self.rows)

    @property
    def advised(self) -> Measurement | None:
        """The fastest row, or one of higher fidelity that is about as fast; None on one rank or if it is too noisy."""
        # DDP's own all-reduce first, then gradwire's by speed: of one kind, the first wins.
        allowed = sorted((row for row in self.rows if row.allowed), key=_gradwires_by_speed)
        if not allowed or self.too_noisy:
            return None
        return choose({row: row.step for row in allowed}, lambda row: MIN_GAIN, least=self.compute)

    @property
    def sentence(self) -> str:
        """The advice: whether to compress, with what, how much faster that is, and what limits it."""
        if self.too_noisy:
            least = min(self.rows, key=_step)
            return (
                f"Too noisy to advise: a step by {least.name} took {seconds(least.step)}, one without communication "
                f"{seconds(self.compute)}, although none can be shorter than that. Something else has used the cores. "
                "Run the probe for longer (--seconds 10 or more), with nothing else on these machines."
            )
        chosen = self.advised
        if chosen is None:
            return (
                "Nothing to compress: one rank exchanges no gradients. Start as many ranks as the job will have, on "
                "its own network, for example with torchrun --nproc-per-node 4 -m gradwire.cli probe …"
            )
        if chosen.kind == FP32:
            return self._dense(chosen)
        return (self._half if chosen.kind == HALF else self._compress)(chosen, self.rows[0])

    def _dense(self, dense: Measurement) -> str:
        took = (
            f"A step takes {seconds(dense.step)} by {dense.name}, {seconds(self.compute)} of it without communication"
        )
        if dense.limit == "backward":
            return (
                "Do not compress: backward hides the all-reduce. "
                f"{took}, so that no compression can make it more than {_percent(1 - self.compute / dense.step)} "
                f"shorter. What limits it: {_LIMITS['backward']}."
            )
        best = self._best(GRADWIRE) or self._best(HALF)
        if best is None:
            return (
                f"Do not compress: fidelity {self.fidelity} allows nothing else. {took}. What limits it: "
                f"{_LIMITS[dense.limit]}. Try --fidelity near-lossless or balanced to see what that would gain."
            )
        reasons = {
            "codec": f"the codec costs what the link saves ({seconds(best.codec)} a step)",
            "latency": "latency costs what the link saves",
            "link": "it does not save enough bytes for this link",
            "backward": "computation takes most of the step, so there is too little to gain",
        }
        return (
            f"Do not compress: {reasons[best.limit]}. {took}; {best.name}, the fastest that was tried, takes "
            f"{seconds(best.step)}. What limits it: {_LIMITS[best.limit]}."
        )

    def _half(self, half: Measurement, dense: Measurement) -> str:
        best = self._best(GRADWIRE)
        more = "" if best is None else f" {best.name} takes {seconds(best.step)}."
        return (
            f"{half.name} is enough: a step of {seconds(half.step)} in place of {seconds(dense.step)}, "
            f"{_times(dense, half)} faster.{more} What limits it: {_LIMITS[half.limit]}; {self._floor(half)}."
        )

    def _compress(self, chosen: Measurement, dense: Measurement) -> str:
        half = self._best(HALF)
        than_half = "" if half is None else f" and {_times(half, chosen)} faster than {half.name}"
        return (
            f"Compress, with {chosen.name}: a step of {seconds(chosen.step)} in place of {seconds(dense.step)}, "
            f"{_times(dense, chosen)} faster than {dense.name}{than_half}. What limits it now: "
            f"{_LIMITS[chosen.limit]}; {self._floor(chosen)}."
        )

    def _best(self, kind: str) -> Measurement | None:
        return min((row for row in self.rows if row.kind == kind and row.allowed), key=_step, default=None)

    def _floor(self, row: Measurement) -> str:
        return f"ideal is {seconds(row.ideal)}, the step without communication {seconds(self.compute)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for machines."""
        chosen = self.advised
        said = {"too_noisy": self.too_noisy, "sentence": self.sentence}
        return asdict(self) | {"advised": chosen and chosen.name} | said


def _step(row: Measurement) -> float:
    return row.step


def _gradwires_by_speed(row: Measurement) -> float:
    return row.step if row.kind == GRADWIRE else 0.0


def _times(slow: Measurement, fast: Measurement) -> str:
    return f"{slow.step / fast.step:.3g} times"


def _percent(share: float) -> str:
    return f"{max(0.0, 100 * share):.0f} %"
