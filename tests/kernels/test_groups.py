"""One call for many tensors gives what calls one by one give, and writes nowhere else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.compressors.base import Compressor
from gradwire.core.context import key_words
from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels.cpu import groups
from gradwire.kernels.cpu.elements import as_input
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import BatchCodec
from gradwire.sync.fusion import FusionGroup, FusionLayout
from gradwire.sync.job import TensorLayout
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.payload import Payload

SIZES = (1, 7, 64, 100, 1025, 4096)
WORLD_SIZE = 3
FLOATS = np.empty(0, np.float32)
METHODS = [
    "onebit", "threelc", "topk:ratio=0.05", "qsgd",
    *(
        pytest.param(method, marks=pytest.mark.ci)
        for method in (
            "threelc:zero_run=False", "int8", "natural", "mqe1bit", "minmax", "tbq", "threshold", "randomk", "dgc",
            "graddrop", "mstopk", "adacomp", "dragonn",
        )
    ),
]  # fmt: skip


class Guarded:
    """An array between bytes that nothing may change."""

    def __init__(self, size: int, dtype: Any = np.float32, values: np.ndarray | None = None) -> None:
        margin, nbytes = 512, size * np.dtype(dtype).itemsize
        self._memory = np.full(nbytes + 2 * margin, 0xA5, np.uint8)
        self._margins = self._memory[:margin], self._memory[margin + nbytes :]
        self.array = self._memory[margin : margin + nbytes].view(dtype)
        if values is not None:
            self.array[:] = values

    def check(self) -> None:
        assert all((margin == 0xA5).all() for margin in self._margins)


@dataclass
class Calls:
    """The arguments of compiled calls for tensors of all sizes."""

    codec: Compressor
    feedback: bool = True
    dtype: torch.dtype = torch.float32
    guarded: list[Guarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        compiled = self.codec.compiled()
        assert compiled is not None
        self.most = [self.codec.max_encoded_bytes(TensorSpec((size,))) for size in SIZES]
        self.table = np.array([(size, 0, most) for size, most in zip(SIZES, self.most, strict=True)], np.int64)
        self.static = np.stack([compiled.static(size, 0) for size in SIZES])
        self.like = as_input(as_array(torch.empty(0, dtype=self.dtype)))
        self.encoder = np.uint64(groups.encoder(compiled.encode, self.like.dtype, self.feedback))
        self.decoder = np.uint64(groups.decoder(compiled.decode_sum))
        self.scratch = self.new(max(compiled.scratch_bytes(size, WORLD_SIZE) for size in SIZES), np.uint8)
        self.total = self.new(max(SIZES))

    def new(self, size: int, dtype: Any = np.float32, values: np.ndarray | None = None) -> np.ndarray:
        self.guarded.append(Guarded(size, dtype, values))
        return self.guarded[-1].array

    def context(self, index: int, rank: int) -> gw.Context:
        return gw.Context(f"t{index}", rank=rank, world_size=WORLD_SIZE, spec=TensorSpec((SIZES[index],)))

    def keys(self, rank: int) -> np.ndarray:
        return np.stack([key_words(self.context(index, rank)) for index in range(len(SIZES))])

    def message(self) -> np.ndarray:
        return self.new(sum(self.most) + groups.MARK_BYTES * len(SIZES), np.uint8)

    def decode(self, messages: list[np.ndarray], outs: list[np.ndarray]) -> int:
        return groups.decode_group(
            self.decoder, FLOATS, self.table, places(outs), self.keys(0), self.static, self.scratch, FLOATS,
            places(messages), lengths(messages),
        )  # fmt: skip

    def merge(self, messages: list[np.ndarray], own: list[np.ndarray], before: list[np.ndarray]) -> Any:
        after, merged = [self.new(size) for size in SIZES], self.message()
        size = groups.merge_group(
            self.encoder, self.decoder, FLOATS, FLOATS, self.table, places(own), np.float32(0.5), places(before),
            places(after), self.keys(0), self.static, self.scratch, self.total, places(messages), lengths(messages),
            merged,
        )  # fmt: skip
        return size, merged[: max(size, 0)], after

    def encode_without_residuals(self, grads: list[np.ndarray], scale: float) -> np.ndarray:
        message, nothing = self.message(), np.zeros(len(SIZES), np.uint64)
        size = groups.encode_group(
            self.encoder, self.like, None, self.table, places(grads), np.float32(scale), nothing, nothing,
            self.keys(0), self.static, self.scratch, message,
        )  # fmt: skip
        return message[:size]

    def encode(self, grads: list[np.ndarray], before: list[np.ndarray], rank: int) -> tuple[np.ndarray, Any]:
        after, message = [self.new(size) for size in SIZES], self.message()
        size = groups.encode_group(
            self.encoder, FLOATS, FLOATS, self.table, places(grads), np.float32(0.5), places(before), places(after),
            self.keys(rank), self.static, self.scratch, message,
        )  # fmt: skip
        return message[:size], after


def places(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def lengths(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.size for array in arrays], np.int64)


def normal(calls: Calls, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [calls.new(size, values=generator.standard_normal(size).astype(np.float32)) for size in SIZES]


def bodies(message: np.ndarray) -> list[bytes]:
    marks = message[: groups.MARK_BYTES * len(SIZES)].view("<u4")
    ends = np.cumsum([groups.MARK_BYTES * len(SIZES), *(marks & groups.LENGTH)])
    assert ends[-1] == message.size and ((marks & groups.USED) != 0).all()
    return [message[start:end].tobytes() for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("method", METHODS)
def test_a_group_is_encoded_added_and_merged_as_its_tensors_are_one_by_one(method: str) -> None:
    calls = Calls(gw.make(method))
    codec, messages = calls.codec, []
    for rank in range(WORLD_SIZE):
        grads, before = normal(calls, 10 * rank), normal(calls, 10 * rank + 1)
        message, after = calls.encode(grads, before, rank)
        messages.append(message)
        for index, body in enumerate(bodies(message)):
            left = np.empty(SIZES[index], np.float32)
            payload = codec.encode(
                torch.from_numpy(grads[index]), calls.context(index, rank), scale=0.5,
                residual_in=before[index], residual_out=left,
            )  # fmt: skip
            assert payload.body.tobytes() == body
            np.testing.assert_array_equal(after[index], left)
    outs = [calls.new(size) for size in SIZES]
    assert calls.decode(messages, outs) == 0
    sums = []
    for index, size in enumerate(SIZES):
        payloads = [Payload(np.frombuffer(bodies(message)[index], np.uint8)) for message in messages]
        contexts = [calls.context(index, rank) for rank in range(WORLD_SIZE)]
        sums.append(codec.decode_sum(payloads, contexts, torch.empty(size)))
        np.testing.assert_array_equal(outs[index], sums[index].numpy())
    # The owner adds its own gradient to two of the messages' sum, and encodes the total.
    own, before = normal(calls, 5), normal(calls, 6)
    _, merged, after = calls.merge(messages, own, before)
    for index, body in enumerate(bodies(merged)):
        left = np.empty(SIZES[index], np.float32)
        total = torch.from_numpy(own[index] * np.float32(0.5) + sums[index].numpy())
        payload = codec.encode(total, calls.context(index, 0), residual_in=before[index], residual_out=left)
        assert payload.body.tobytes() == body
        np.testing.assert_array_equal(after[index], left)
    for each in calls.guarded:
        each.check()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.ci)])
@pytest.mark.parametrize("method", METHODS)
def test_without_residuals_a_group_has_the_bytes_of_its_tensors_one_by_one(method: str, dtype: torch.dtype) -> None:
    calls = Calls(gw.make(method), feedback=False, dtype=dtype)
    smallest = float(np.finfo(np.float16 if dtype == torch.float16 else np.float32).smallest_subnormal)
    for factor in (1.0, smallest, 0.0):
        grads = [torch.from_numpy(each * np.float32(factor)).to(dtype) for each in normal(calls, 1)]
        message = calls.encode_without_residuals([as_array(grad) for grad in grads], 1 / 3)
        for index, body in enumerate(bodies(message)):
            payload = calls.codec.encode(grads[index], calls.context(index, 0), scale=1 / 3)
            assert payload.body.tobytes() == body, (factor, SIZES[index])
    for each in calls.guarded:
        each.check()


@pytest.mark.parametrize("method", ["onebit", "threelc", "topk:ratio=0.05"])
@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_decoded_or_refused_within_the_buffers(method: str, seed: int) -> None:
    calls, generator = Calls(gw.make(method)), np.random.default_rng(seed)
    good, _ = calls.encode(normal(calls, seed), normal(calls, seed + 1), 0)
    outs = [calls.new(size) for size in SIZES]
    for _ in range(50):
        bad = calls.new(good.size, np.uint8, good)
        for place in generator.integers(0, bad.size, 3):
            bad[place] = generator.integers(0, 256)
        bad = bad[: generator.integers(0, bad.size + 1)] if generator.random() < 0.3 else bad
        assert calls.decode([bad, good], outs) in (groups.INVALID, 0, 1)
    for each in calls.guarded:
        each.check()


def resized(message: np.ndarray, index: int, num_bytes: int, num_tensors: int = len(SIZES)) -> np.ndarray:
    """A message in which one payload has this many bytes, and its mark says so."""
    table = message[: groups.MARK_BYTES * num_tensors].copy()
    marks = table.view("<u4")
    ends = np.cumsum([table.size, *(marks & groups.LENGTH)])
    body = np.resize(message[ends[index] : ends[index + 1]], num_bytes)
    marks[index] = groups.USED | np.uint32(num_bytes)
    return np.concatenate([table, message[table.size : ends[index]], body, message[ends[index + 1] :]])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("index", range(len(SIZES)))
def test_a_payload_of_another_size_makes_a_message_invalid(method: str, index: int) -> None:
    calls = Calls(gw.make(method))
    good, _ = calls.encode(normal(calls, 1), normal(calls, 2), 0)
    outs, own, before = [calls.new(size) for size in SIZES], normal(calls, 3), normal(calls, 4)
    whole = len(bodies(good)[index])
    for num_bytes in {0, 1, 4, 8, whole // 2, whole - 1, whole + 1} - {whole}:
        bad = resized(good, index, num_bytes)
        for messages in ([bad], [good, bad], [bad, good]):
            assert calls.decode(messages, outs) == groups.INVALID, num_bytes
            assert calls.merge(messages, own, before)[0] == groups.INVALID, num_bytes
    for each in calls.guarded:
        each.check()


@pytest.mark.parametrize("method", METHODS)
def test_the_sender_of_a_short_payload_is_named(method: str) -> None:
    compressor = gw.make(method)
    entry = PlanEntry(compressor, feedback=compressor.default_feedback)
    members = [TensorLayout(f"t{index}", index, entry, torch.float32, 300, rotation=index) for index in range(2)]
    values = [torch.randn(300, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    group = FusionGroup(FusionLayout(members), values, [True] * 2, 0, 0)
    compiled = BatchCodec.compiled_of(group, Residuals())
    assert compiled is not None
    codec, (chunk,) = BatchCodec(group, Residuals(), 0, 2, 0, compiled), group.layout.chunks(1)
    good = codec.start(chunk)
    for index in range(2):
        bad = Payload(resized(good.body, index, 0, 2), used=True, sender=1)
        for use in (lambda bad=bad: codec.merge(chunk, [good, bad], 1), lambda bad=bad: codec.decode(chunk, [bad], 1)):
            with pytest.raises(SyncError, match="Rank 1 sent bytes that are not a payload of t") as caught:
                use()
            assert (caught.value.rank, caught.value.tensor) == (1, f"t{index}")
