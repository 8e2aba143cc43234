"""n workers and their aggregator in one process: how a mean of gradients is formed, and what is lost on the way.

Codecs, residuals and integer sums are those of the package. There is no network and no clock; the result is accuracy. A
gradient is one flat tensor, like a partition in THC. With blocks of 1,024 elements, a block is a packet, and packets
are lost. Each of the paper's measures (section 6) is a class:

- `PacketLoss`: packets are lost in both directions. A packet that does not reach the aggregator is not in the sum,
  which is divided by the number of those that do (partial aggregation). A worker that does not receive a sum uses
  zeros.
- `Stragglers`: the aggregator does not wait for the last few workers, who differ in each step.
- `LeftOut`: gradients that are not in the sum. The paper drops them; they can also be kept as residuals.

`benchmarks.papers.thc.simulated_training` has the workers, and what they synchronize after an epoch.

Source: THC (Li et al. 2024), section 6 and section 8.4, "simulation environment". Differences: the preliminary round is
never lost.
"""
# Shapes: N elements of the flat gradient, n workers, G packets of a gradient

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire.compressors import Compressor
from gradwire.compressors.base import Reduction, Stat
from gradwire.compressors.support.homomorphic import Homomorphic
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.kernels.blocks import index_bytes
from gradwire.residuals import EncodeInput, policies
from gradwire.residuals.slices import ResidualKey, Role
from gradwire.residuals.transaction import Residuals
from gradwire.wire.payload import Payload

NAME = "model"
_REDUCE: dict[Reduction, np.ufunc] = {"max": np.maximum, "min": np.minimum, "sum": np.add}


# -- what happens on the way ---------------------------------------------------------------------------------------


class Delivery(NamedTuple):
    """Packets that arrive, bool[n, G]: of each worker's gradient, and of the sum at each worker."""

    there: np.ndarray
    back: np.ndarray


@dataclass(frozen=True)
class Reliable:
    """All packets arrive."""

    diverges = False

    def draw(self, step: int, num_workers: int, num_packets: int) -> Delivery:
        """Draw the packets that arrive in a step."""
        everything = np.ones((num_workers, num_packets), bool)
        return Delivery(everything, everything)


@dataclass(frozen=True)
class PacketLoss:
    """Packets are lost independently, in both directions. Replicas diverge.

    Args:
        rate: Fraction of lost packets.
        seed: Seed of the losses.
    """

    rate: float
    seed: int
    diverges = True

    def draw(self, step: int, num_workers: int, num_packets: int) -> Delivery:
        """Draw the packets that arrive in a step."""
        there, back = np.random.default_rng([self.seed, step]).random((2, num_workers, num_packets)) >= self.rate
        return Delivery(there, back)


@dataclass(frozen=True)
class Stragglers:
    """The aggregator does not wait for a few workers, which change with each step. They still receive the sum.

    Args:
        count: Number of stragglers.
        seed: Seed of their choice.
    """

    count: int
    seed: int
    diverges = False

    def draw(self, step: int, num_workers: int, num_packets: int) -> Delivery:
        """Draw the packets that arrive in a step."""
        there = np.ones((num_workers, num_packets), bool)
        there[np.random.default_rng([self.seed, step]).permutation(num_workers)[: self.count]] = False
        return Delivery(there, np.ones_like(there))


Faults = Reliable | PacketLoss | Stragglers


@dataclass(frozen=True)
class LeftOut:
    """What happens to gradients that are not in the sum.

    Args:
        keep: Whether workers keep them in their residuals. If not, they are lost, as in the paper.
        divisor: "counted" divides a sum by the number of gradients in it, "all" by the number of workers. Kept
            gradients are in a later sum, so with "counted" all gradients together weigh more than they would in means.
    """

    keep: bool = False
    divisor: str = "counted"


# -- who encodes ---------------------------------------------------------------------------------------------------


class Encoder:
    """A worker that encodes its gradient, or an aggregator that encodes a mean, with its residual.

    Args:
        codec: Compressor.
        size: N.
        rank: Rank of the worker.
        num_workers: n.
        seed: Seed of rotations and roundings.
        feedback: Residual policy. Default: that of the codec.
        role: "aggregate" for a mean, which is encoded as it is; gradients are divided by n.
    """

    def __init__(
        self, codec: Compressor, size: int, rank: int, num_workers: int, seed: int, *,
        feedback: str | None = None, role: Role = "local",
    ) -> None:  # fmt: skip
        self.codec, self.rank, self.num_workers, self.seed = codec, rank, num_workers, seed
        self.spec, self.stage = TensorSpec((size,)), int(role == "aggregate")
        self.scale = 1.0 if self.stage else 1 / num_workers
        self.policy = policies.get(feedback or codec.default_feedback)
        self.residuals, self.key = Residuals(), ResidualKey(NAME, ElementRange(0, size), role)

    def context(self, step: int) -> Context:
        """Context of the encode in a step."""
        return Context(
            NAME, step, self.rank, self.num_workers, self.seed, stage=self.stage, spec=self.spec
        )  # fmt: skip

    def stats(self, grad: torch.Tensor, step: int) -> list[Stat]:
        """Statistics to reduce over workers. `encode` follows."""
        return self.policy.stats(self._input(grad, step))

    def encode(self, grad: torch.Tensor, step: int, stats: Sequence[np.ndarray] = ()) -> Payload:
        """Encode a gradient, and keep what the payload does not carry."""
        payload = self.policy.encode(self._input(grad, step), stats)
        self.residuals.commit()
        return payload

    def _input(self, grad: torch.Tensor, step: int) -> EncodeInput:
        return EncodeInput(self.codec, grad, self.context(step), self.residuals, self.key, self.scale)

    def take_back(self, values: np.ndarray) -> None:
        """Keep values that were sent but are in no sum."""
        self.residuals.add(self.key, values)


# -- aggregators ---------------------------------------------------------------------------------------------------


class Aggregator(ABC):
    """Forms the mean of n gradients.

    Attributes:
        diverges: Whether workers may receive different means.
        lost: int[n], packets of means that did not reach each worker since the last check.
        bits_there: Maximum bits per element from each worker to the aggregator.
        bits_back: Maximum bits per element to each worker.
    """

    diverges = False
    bits_there = bits_back = 32.0

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.lost = np.zeros(num_workers, np.int64)

    @abstractmethod
    def means(self, grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Mean that each worker receives. Workers that receive the same mean share one tensor."""


class Dense(Aggregator):
    """No compression."""

    def means(self, grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """See `Aggregator`."""
        return [torch.stack(tuple(grads)).mean(0)] * self.num_workers


class Lossy(Aggregator):
    """Sums from which packets are missing, and workers who do not receive all of a mean.

    Args:
        num_workers: n.
        num_packets: G.
        packet: Elements per packet.
        faults: What happens on the way.
        left_out: What happens to gradients that are not in the sum.
    """

    def __init__(
        self, num_workers: int, num_packets: int, packet: int, faults: Faults | None, left_out: LeftOut | None
    ) -> None:  # fmt: skip
        super().__init__(num_workers)
        self.num_packets, self.packet = num_packets, packet
        self.faults, self.left_out = faults or Reliable(), left_out or LeftOut()
        self.diverges = self.faults.diverges

    def means(self, grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """See `Aggregator`."""
        there, back = self.faults.draw(step, self.num_workers, self.num_packets)
        mean = self._partial_sum(grads, there, step)
        self._divide(mean.numpy(), there.sum(0))
        self.lost += (~back).sum(1)
        return [self._received(mean, arrived) for arrived in back]

    @abstractmethod
    def _partial_sum(self, grads: Sequence[torch.Tensor], there: np.ndarray, step: int) -> torch.Tensor:
        """Sum of the packets that arrived, bool[n, G], divided by n. Gradients that are kept go to residuals."""

    def _divide(self, mean: np.ndarray, counts: np.ndarray) -> None:
        """Correct the divisor of a sum that was divided by n."""
        if self.left_out.divisor == "counted":
            for packet in np.flatnonzero((counts > 0) & (counts < self.num_workers)):
                mean[self._elements(packet)] *= np.float32(self.num_workers / counts[packet])

    def _received(self, mean: torch.Tensor, arrived: np.ndarray) -> torch.Tensor:
        """Replace lost packets by gradients of zero. (An integer of zero does not stand for a gradient of zero.)"""
        if arrived.all():
            return mean
        mean = mean.clone()
        for packet in np.flatnonzero(~arrived):
            mean[self._elements(packet)] = 0
        return mean

    def _elements(self, packet: int) -> slice:
        return slice(packet * self.packet, (packet + 1) * self.packet)


class DenseSums(Lossy):
    """No compression, with the faults of `IntegerSums`: its control. The same packets are lost in the same steps.

    Args:
        num_workers: n.
        size: N.
        packet: Elements per packet.
        faults: What happens on the way.
        left_out: What happens to gradients that are not in the sum.
    """

    def __init__(
        self, num_workers: int, size: int, *,
        packet: int = 1024, faults: Faults | None = None, left_out: LeftOut | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_workers, -(-size // packet), packet, faults, left_out)
        self.kept = np.zeros((num_workers, size), np.float32)

    def _partial_sum(self, grads: Sequence[torch.Tensor], there: np.ndarray, step: int) -> torch.Tensor:
        each = torch.stack(tuple(grads)).numpy() / np.float32(self.num_workers) + self.kept
        arrived = np.repeat(there, self.packet, axis=1)[:, : each.shape[1]]
        if self.left_out.keep:
            self.kept = np.where(arrived, np.float32(0), each)
        return torch.from_numpy(np.where(arrived, each, np.float32(0)).sum(0))


class Reencoded(Aggregator):
    """Payloads are decoded and added, and the mean is encoded again for the way back. For methods without integer sums.

    Args:
        there: Codec of gradients.
        back: Codec of the mean.
        num_workers: n.
        size: N.
        seed: Seed of roundings.
    """

    def __init__(self, there: Compressor, back: Compressor, num_workers: int, size: int, seed: int) -> None:
        super().__init__(num_workers)
        self.workers = [Encoder(there, size, rank, num_workers, seed) for rank in range(num_workers)]
        self.again = Encoder(back, size, 0, num_workers, seed, role="aggregate")
        self.bits_there, self.bits_back = (
            8 * codec.max_encoded_bytes(TensorSpec((size,))) / size for codec in (there, back)
        )

    def means(self, grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """See `Aggregator`."""
        payloads = [worker.encode(grad, step) for worker, grad in zip(self.workers, grads)]
        contexts = [worker.context(step) for worker in self.workers]
        mean = self.workers[0].codec.decode_sum(payloads, contexts, torch.empty(self.again.spec.shape))
        payload = self.again.encode(mean, step)
        return [self.again.codec.decode(payload, self.again.context(step))] * self.num_workers


class IntegerSums(Lossy):
    """Table values are added as integers, and all workers decode the sum: `thc` and `uthc`.

    Args:
        codec: `thc` or `uthc`, with a block of 1,024 for faults that lose packets.
        num_workers: n.
        size: N.
        seed: Seed of rotations and roundings.
        feedback: Residual policy. Default: that of the codec.
        faults: What happens on the way.
        left_out: What happens to gradients that are not in the sum.
    """

    def __init__(
        self, codec: Homomorphic, num_workers: int, size: int, seed: int, *,
        feedback: str | None = None, faults: Faults | None = None, left_out: LeftOut | None = None,
    ) -> None:  # fmt: skip
        spec = TensorSpec((size,))
        num_packets = codec.stats_spec(spec)[0][0]
        super().__init__(num_workers, num_packets, codec.block if num_packets > 1 else size, faults, left_out)
        self.codec = codec
        self.workers = [
            Encoder(codec, size, rank, num_workers, seed, feedback=feedback) for rank in range(num_workers)
        ]  # fmt: skip
        shared, num_values = 4 * sum(count for count, _ in codec.stats_spec(spec)), codec.accumulator_size(spec)
        packed = index_bytes(num_values - 1, codec.lookup_table(num_workers).bits)
        self.bits_there = 8 * (shared + packed) / size
        self.bits_back = 8 * (shared + num_values * codec.accumulator_dtype(num_workers).itemsize) / size

    def _partial_sum(self, grads: Sequence[torch.Tensor], there: np.ndarray, step: int) -> torch.Tensor:
        stats = self._preliminary_round(grads, step)
        payloads = [worker.encode(grad, step, stats) for worker, grad in zip(self.workers, grads)]
        if self.left_out.keep:
            self._take_back(payloads, there, stats, step)
        first = self.workers[0]
        mean = torch.empty(first.spec.shape)
        total = self._sum(payloads, there, step)
        return self.codec.finalize_blocks(total, there.sum(0), first.context(step), stats, mean)

    def _preliminary_round(self, grads: Sequence[torch.Tensor], step: int) -> list[np.ndarray]:
        each = zip(*(worker.stats(grad, step) for worker, grad in zip(self.workers, grads)))
        return [_REDUCE[entry[0].reduction].reduce([stat.values for stat in entry]) for entry in each]

    def _sum(self, payloads: Sequence[Payload], there: np.ndarray, step: int) -> np.ndarray:
        """Sum of the packets that arrived."""
        ctx = self.workers[0].context(step)
        accumulator = np.zeros(
            self.codec.accumulator_size(self.workers[0].spec), self.codec.accumulator_dtype(self.num_workers)
        )
        values = np.empty_like(accumulator)
        for payload, arrived in zip(payloads, there):
            values.fill(0)
            self.codec.accumulate(payload, ctx, values)
            for packet in np.flatnonzero(~arrived):
                values[:-1][self._elements(packet)] = 0
            accumulator += values
        return accumulator[:-1]

    def _take_back(
        self, payloads: Sequence[Payload], there: np.ndarray, stats: Sequence[np.ndarray], step: int
    ) -> None:  # fmt: skip
        for worker, payload, arrived in zip(self.workers, payloads, there):
            if not arrived.all():
                values = self.codec.decode(payload, worker.context(step), stats=stats).numpy()
                for packet in np.flatnonzero(arrived):
                    values[self._elements(packet)] = 0
                worker.take_back(values)
