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
from gradwire.core.spec import TensorSpec
from gradwire.kernels.cpu import groups
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
    guarded: list[Guarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        compiled = self.codec.compiled()
        assert compiled is not None
        self.most = [self.codec.max_encoded_bytes(TensorSpec((size,))) for size in SIZES]
        self.table = np.array([(size, 0, most) for size, most in zip(SIZES, self.most, strict=True)], np.int64)
        self.static = np.stack([compiled.static(size, 0) for size in SIZES])
        self.encoder = np.uint64(groups.encoder(compiled.encode, FLOATS.dtype, True))
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

    def encode(self, grads: list[np.ndarray], before: list[np.ndarray], rank: int) -> tuple[np.ndarray, Any]:
        after, message = [self.new(size) for size in SIZES], self.message()
        size = groups.encode_group(
            self.encoder, FLOATS, FLOATS, self.table, places(grads), np.float32(0.5), places(before), places(after),
            self.keys(rank), self.static, self.scratch, message,
        )  # fmt: skip
        return message[:size], after


def places(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


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
    addresses, sizes = places(messages), np.array([message.size for message in messages], np.int64)
    outs = [calls.new(size) for size in SIZES]
    found = groups.decode_group(
        calls.decoder, FLOATS, calls.table, places(outs), calls.keys(0), calls.static, calls.scratch, FLOATS,
        addresses, sizes,
    )  # fmt: skip
    assert found == 0
    sums = []
    for index, size in enumerate(SIZES):
        payloads = [Payload(np.frombuffer(bodies(message)[index], np.uint8)) for message in messages]
        contexts = [calls.context(index, rank) for rank in range(WORLD_SIZE)]
        sums.append(codec.decode_sum(payloads, contexts, torch.empty(size)))
        np.testing.assert_array_equal(outs[index], sums[index].numpy())
    # The owner adds its own gradient to two of the messages' sum, and encodes the total.
    own, before, after = normal(calls, 5), normal(calls, 6), [calls.new(size) for size in SIZES]
    merged = calls.message()
    size = groups.merge_group(
        calls.encoder, calls.decoder, FLOATS, FLOATS, calls.table, places(own), np.float32(0.5), places(before),
        places(after), calls.keys(0), calls.static, calls.scratch, calls.total, addresses, sizes, merged,
    )  # fmt: skip
    for index, body in enumerate(bodies(merged[:size])):
        left = np.empty(SIZES[index], np.float32)
        total = torch.from_numpy(own[index] * np.float32(0.5) + sums[index].numpy())
        payload = codec.encode(total, calls.context(index, 0), residual_in=before[index], residual_out=left)
        assert payload.body.tobytes() == body
        np.testing.assert_array_equal(after[index], left)
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
        found = groups.decode_group(
            calls.decoder, FLOATS, calls.table, places(outs), calls.keys(0), calls.static, calls.scratch, FLOATS,
            places([bad, good]), np.array([bad.size, good.size], np.int64),
        )  # fmt: skip
        assert found in (groups.INVALID, 0, 1)
    for each in calls.guarded:
        each.check()
