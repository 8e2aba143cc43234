"""The ranks of the breakdown. Each stage adds one part of HiPress.

Every stage uses `gradwire.Synchronizer`, as `attach` does, with its own DDP hook. Stages differ in which tensors the
plan compresses, what is submitted together, and when the hook waits.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import worker
from gradwire.bench.job import Progress, Segment, SegmentOutcome
from gradwire.bench.methods import MethodCosts, is_native
from gradwire.bench.rank import Rank, RunSegment
from gradwire.bench.recording import Recording, record_all
from gradwire.bench.replay import RecordedModel, Replay, run_replay
from gradwire.bench.rivals import pack
from gradwire.bench.segment import is_identical
from gradwire.bench.statistics import ring_bytes
from gradwire.bench.timing import time_steps
from gradwire.compressors import Compressor, register
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, PlanTable, plan
from gradwire.planner.fidelity import FEW_ENCODES, RankedCompressor
from gradwire.sync.options import SyncOptions
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.tuning.calibration import Calibration
from gradwire.wire.payload import Payload

CODEC = "onebit"
STAGES = ("torch", "generated", "pipelined", "bulk", "planned")
_BITS = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
EVERY_TENSOR = "?*"  # a rule that is no blanket one holds for vectors and small tensors, too


class TorchOnebit(Compressor):
    """`onebit` in plain torch operations, as a user would write it: same values, another order of bits."""

    name = "torch_onebit"

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Two means and one bit per element."""
        return 8 + -(-spec.numel // 8)

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        *,
        scale: float = 1.0,
        residual_in: np.ndarray | None = None,
        residual_out: np.ndarray | None = None,
    ) -> Payload:
        """See `Compressor`."""
        g = grad.reshape(-1).float() * scale
        if residual_in is not None:
            g += torch.from_numpy(residual_in)
        negative = g < 0
        count = negative.sum()
        low_sum = torch.where(negative, g, 0).sum()
        means = torch.stack((low_sum / count.clamp(min=1), (g.sum() - low_sum) / (g.numel() - count).clamp(min=1)))
        if not means.isfinite().all():
            return Payload(np.empty(0, np.uint8), nonfinite=True)
        bits = torch.nn.functional.pad((~negative).view(torch.uint8), (0, -g.numel() % 8))
        if residual_out is not None:
            torch.sub(g, torch.where(negative, *means), out=torch.from_numpy(residual_out))
        return Payload(torch.cat((means.view(torch.uint8), pack(bits, 1))).numpy())

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """See `Compressor`."""
        out = self._output(ctx, out)
        body = torch.from_numpy(self._expect_bytes(payload, self.max_encoded_bytes(TensorSpec.of(out))))
        low, high = body[:8].clone().view(torch.float32)
        positive = (body[8:] >> _BITS & 1).view(-1)[: out.numel()].view(out.shape)
        values = torch.where(positive == 1, high, low)
        return out.add_(values) if accumulate else out.copy_(values)


@dataclass(frozen=True)
class How:
    """How a stage synchronizes.

    Attributes:
        plan: Initial plan.
        buckets: Whether to submit whole buckets instead of tensor after tensor.
        waits: Whether to wait for each tensor before the next one is encoded.
        chosen: What the planner chooses from at each rate; empty if the plan is fixed.
        partitions: Numbers of partitions that the planner tries; None for its own.
        threads: Number of computation threads; None for the default.
    """

    plan: Plan
    buckets: bool = True
    waits: bool = False
    chosen: tuple[RankedCompressor, ...] = ()
    partitions: tuple[int, ...] | None = None
    threads: int | None = None


def how(stage: str) -> How:
    """How one of `STAGES` synchronizes."""
    if stage in ("bulk", "planned"):
        chosen = (RankedCompressor(CODEC, FEW_ENCODES),) if stage == "planned" else ()
        return How(Plan(CODEC), chosen=chosen)
    every = TorchOnebit() if stage == "torch" else CODEC
    return How(Plan({EVERY_TENSOR: every}), buckets=False, waits=stage != "pipelined")


class Staged:
    """Synchronizes the gradients of a DDP module as a stage does: a `gradwire.bench.methods.ConnectedMethod`."""

    def __init__(self, how: How, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
        self.how, self._ddp = how, ddp
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        specs = {name: TensorSpec.of(parameter) for name, parameter in ddp.module.named_parameters()}
        options = SyncOptions(seed=rank.job.seed, threads=how.threads)
        self.synchronizer = Synchronizer(None, how.plan, tensors=specs, options=options)
        self.survey = Calibration(self.synchronizer, max(spec.numel for spec in specs.values()))
        self.native = False  # by DDP's own all-reduce, as the planner may want it
        self.native_bytes = 0
        self.replan: Callable[[], object] = lambda: None
        self._unhook = optimizer.register_step_post_hook(lambda *_: self.synchronizer.commit())
        # Unannotated: torch compares annotations as objects, and here they are strings.
        ddp.register_comm_hook(None, lambda state, bucket: self._average(bucket))

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self.synchronizer.begin_step()
        if self.native:
            self.native_bytes += ring_bytes(buffer.nbytes, dist.get_world_size())
            return allreduce_hook(dist.group.WORLD, bucket)
        shards = [
            GradientSlice(self._names[id(parameter)], grad)
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if self.how.buckets:
            return self.synchronizer.submit(shards, result=buffer)
        futures = []
        for shard in shards:
            futures.append(self.synchronizer.submit([shard]))
            if self.how.waits:
                self.synchronizer.wait()
        return torch.futures.collect_all(futures).then(lambda _: buffer)

    def costs(self, steps: int) -> MethodCosts:
        """See `ConnectedMethod`."""
        total, native = self.synchronizer.report().total, self.native_bytes
        return MethodCosts(
            total.sent_bytes + native, total.dense_bytes + native, total.encode_seconds, total.decode_seconds
        )

    def settle(self, step: Callable[[], object], restart: bool = True) -> None:
        """Fill the queues of the links. Then plan for them, if the stage plans, always anew."""
        step()
        if self.how.chosen:
            self.replan()
            step()

    def close(self) -> None:
        """End the synchronizer."""
        self._unhook.remove()
        self.synchronizer.close()


def make_plan(staged: Staged, recording: Recording, rank: Rank) -> PlanTable:
    """Plan on rank 0 for the current links, with the times of the recorded backward pass."""
    costs = staged.survey.costs([method.spec for method in staged.how.chosen])
    first, specs = recording.buckets[0].ready_seconds, staged.synchronizer.tensors
    ready = {name: bucket.ready_seconds - first for bucket in recording.buckets for name in _inner(bucket.names)}
    backward = recording.backward_seconds - first
    tensors = [PlannedTensor(name, spec.shape, spec.dtype, ready[name]) for name, spec in specs.items()]
    text = None
    if rank.rank == 0:
        text = plan(
            tensors, costs, staged.how.chosen, partitions=staged.how.partitions, backward=backward,
            rest=recording.step_seconds - backward, bucket_bytes=None, min_elements=staged.how.plan.min_elements,
        ).to_json()  # fmt: skip
    return PlanTable.from_json(staged.synchronizer.share(text))


def _inner(names: Sequence[str]) -> list[str]:
    return [name.replace(".", "/") for name in names]  # as the replayed model has them


def _run(rank: Rank, index: int, recording: Recording, how: How) -> SegmentOutcome:
    """Run one stage at each rate."""
    segment: Segment = rank.job.segments[index]
    rank.set_rate(None)
    ddp = DistributedDataParallel(
        RecordedModel(recording), bucket_cap_mb=segment.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    staged = Staged(how, ddp, optimizer, rank)
    replay, timed = Replay(rank, segment, ddp, optimizer, staged), []
    replay.warm_up()

    def replan() -> None:
        table = make_plan(staged, recording, rank)
        staged.native = table.native
        staged.synchronizer.replan(table.plan())
        if rank.rank == 0:
            rank.say(Progress(index, table.to_json(), 0, 0, rate=segment.rates[len(timed)]))

    staged.replan = replan
    for rate in segment.rates:
        timed.append(time_steps(replay, index, rate))
    rank.set_rate(None)
    identical = is_identical([parameter.grad for parameter in ddp.parameters() if parameter.grad is not None])
    staged.close()
    return SegmentOutcome(index, rank.rank, identical=identical, timed=timed)


def runner(rank: Rank, how_of: Callable[[str], How] = how) -> RunSegment:
    """Return a function that runs segments. A method is a stage, which `how_of` looks up, or one of DDP's own."""
    recordings = record_all(rank)

    def run(index: int) -> SegmentOutcome:
        segment = rank.job.segments[index]
        if is_native(segment.method):
            return run_replay(rank, index, recordings)
        return _run(rank, index, recordings[segment.bucket_mb], how_of(segment.method))

    return run


if __name__ == "__main__":
    register(TorchOnebit)
    worker.main(runner)
