"""Results of a training benchmark: figures by method, computed from the outcomes of the ranks."""
# Shapes: S = steps, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from gradwire.bench import methods
from gradwire.bench.job import TimedSteps
from gradwire.bench.statistics import (
    HEADER_BYTES,
    Split,
    Spread,
    across_ranks,
    ideal_step,
    relative_difference,
    wire_seconds,
)
from gradwire.lab.units import parse_rate


@dataclass(frozen=True)
class StepTime:
    """One method at one rate. Times are in seconds. Bytes are those of one rank and step, averaged over ranks.

    Attributes:
        rate: Rate of each link in tc's notation; None for links as they are.
        measured: Whether the step was timed on links of this rate. If not, it is predicted as the larger of the step on
            loopback and bytes over rate.
        step: Step time; without spread if predicted.
        compute: Step time without communication.
        bytes: Bytes sent, counted by gradwire or computed for DDP's own all-reduce.
        dense_bytes: Bytes of a ring all-reduce of fp32 gradients.
        interface_bytes: Bytes sent according to the network interface, with headers; None outside of the lab.
        interface_payload: The same without Ethernet, IP and TCP headers.
        ideal: The larger of `compute` and bytes over rate.
        split: Shares of the step time.
        bucket_mb: DDP's bucket size; the best of those tried at this rate.
        processor: Processor time of all threads of a rank.
        settled: What ``auto`` had settled on; see `gradwire.bench.methods.ConnectedMethod.settle`.
        settling: Time that it took until then, with kernels compiled.
    """

    rate: str | None
    measured: bool
    step: Spread
    compute: float
    bytes: float
    dense_bytes: float
    interface_bytes: float | None
    interface_payload: float | None
    ideal: float
    split: Split
    bucket_mb: float
    processor: float = 0.0
    settled: str | None = None
    settling: float = 0.0

    @property
    def ratio(self) -> float:
        """Compression ratio: dense bytes over bytes."""
        return self.dense_bytes / self.bytes if self.bytes else float("inf")

    @property
    def over_ideal(self) -> float:
        """Step time over ideal step; 1 is optimal."""
        return self.step.median / self.ideal

    @property
    def interface_difference(self) -> float | None:
        """Relative difference of the interface's payload count from our own."""
        return None if self.interface_payload is None else relative_difference(self.interface_payload, self.bytes)


@dataclass(frozen=True)
class MethodResult:
    """Results of one method.

    Attributes:
        method: Name of the method.
        losses: Training loss of each step, averaged over ranks.
        validation_loss: Validation loss after these steps.
        validation_accuracy: Validation accuracy after these steps.
        identical: Whether all ranks held the same bits at the end.
        times: Step times at each rate.
        train_seconds: Duration of each step of the loss curve, averaged over ranks.
        validations: Step, validation loss and accuracy of validations along the loss curve.
    """

    method: str
    losses: list[float]
    validation_loss: float | None
    validation_accuracy: float | None
    identical: bool
    times: list[StepTime]
    train_seconds: list[float] = field(default_factory=list)
    validations: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Display name of the method."""
        return methods.label(self.method)


@dataclass(frozen=True)
class TrainingResult:
    """Results of a run.

    Attributes:
        workload: Summary of the workload.
        num_parameters: Number of parameters of the model.
        ranks: W.
        batch_size: Batch size of each rank.
        train_steps: S, steps of the loss curves.
        rates: Rates of the step times.
        shaped: Whether links were shaped. If not, step times are predicted.
        replayed: Whether a recorded backward pass was replayed instead of computed.
        seconds: Duration of the whole run.
        environment: Versions and machine.
        note: Remark for the reader, such as why links were not shaped.
        results: Results of each method.
    """

    workload: str
    num_parameters: int
    ranks: int
    batch_size: int
    train_steps: int
    rates: list[str | None]
    shaped: bool
    replayed: bool
    seconds: float
    environment: dict[str, str]
    note: str = ""
    results: list[MethodResult] = field(default_factory=list)

    def of(self, method: str) -> MethodResult | None:
        """The result of a method, or None if it did not run."""
        return next((result for result in self.results if result.method == method), None)

    def speedup(self, result: MethodResult, index: int = 0) -> float | None:
        """Step time of DDP fp32 over that of a method at one rate; None without that baseline."""
        baseline = self.of(methods.DDP_FP32)
        if baseline is None or len(baseline.times) <= index or len(result.times) <= index:
            return None
        return baseline.times[index].step.median / result.times[index].step.median

    def loss_difference(self, result: MethodResult) -> float | None:
        """Relative difference from the validation loss of DDP fp32, or None without losses."""
        baseline = self.of(methods.DDP_FP32)
        if baseline is None or baseline.validation_loss is None or result.validation_loss is None:
            return None
        return relative_difference(result.validation_loss, baseline.validation_loss)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, including derived figures."""
        data = asdict(self)
        for plain, result in zip(data["results"], self.results, strict=True):
            plain["label"] = result.label
            plain["loss_difference"] = self.loss_difference(result)
            for index, (row, time) in enumerate(zip(plain["times"], result.times, strict=True)):
                row |= {
                    "ratio": time.ratio,
                    "over_ideal": time.over_ideal,
                    "interface_difference": time.interface_difference,
                    "speedup": self.speedup(result, index),
                }
        return data


def combine_times(timed: Sequence[TimedSteps], compute: float, measured: bool, bucket_mb: float = 25.0) -> StepTime:
    """Combine the timed steps of all ranks."""
    steps = across_ranks([rank.seconds for rank in timed])
    per_step = 1 / (len(steps) * len(timed))
    rate = timed[0].rate
    rate_bits = parse_rate(rate)
    num_bytes = per_step * sum(rank.sent_bytes for rank in timed)
    step = Spread.of(steps)
    if not measured:
        predicted = max(step.median, wire_seconds(num_bytes, rate_bits))
        step = Spread(predicted, predicted, predicted, 0)
    interface = _mean_or_none([rank.interface_bytes for rank in timed])
    packets = _mean_or_none([rank.interface_packets for rank in timed])
    encode = per_step * sum(rank.encode_seconds for rank in timed)
    decode = per_step * sum(rank.decode_seconds for rank in timed)
    return StepTime(
        rate=rate,
        measured=measured,
        step=step,
        compute=compute,
        bytes=num_bytes,
        dense_bytes=per_step * sum(rank.dense_bytes for rank in timed),
        interface_bytes=None if interface is None else interface / len(steps),
        interface_payload=None
        if interface is None or packets is None
        else (interface - HEADER_BYTES * packets) / len(steps),
        ideal=ideal_step(compute, num_bytes, rate_bits),
        split=Split.of(step.median, compute, encode, decode),
        bucket_mb=bucket_mb,
        processor=per_step * sum(rank.processor_seconds for rank in timed),
        settled=timed[0].settled,
        settling=max(rank.settling_seconds for rank in timed),
    )


def _mean_or_none(values: Sequence[int | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
