"""Targets of the fuzz campaign: the decoder of every compressor."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor, registry
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.wire.payload import Payload
from tests.fuzz.target import BrokenPromiseError, Seed, Target


class DecoderTarget(Target):
    """A payload decodes to a tensor of the receiver's spec or is a `PayloadError`."""

    framed = False

    SPECS = tuple(
        TensorSpec(shape, dtype)
        for shape in ((0,), (1,), (5,), (33, 9), (1500,))
        for dtype in (torch.float32, torch.bfloat16)
    )

    def __init__(self, compressor: str, shared: bool = False, **options: Any) -> None:
        named = "".join(f" {key}={value}" for key, value in options.items())
        self.name = f"decode:{compressor}{named}" + " with shared values" * shared
        self.compressor = registry.make(compressor, **options)
        self.shared = shared

    def corpus(self) -> list[Seed]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for spec in self.SPECS:
            dense = torch.randn(spec.shape, generator=generator)
            sparse = dense * (torch.rand(spec.shape, generator=generator) < 0.05)
            for values in (dense, sparse, torch.zeros(spec.shape)):
                payload = self.compressor.encode(values.to(spec.dtype), self.context(spec), stats=self.stats(spec))
                found.append(Seed(payload.body.tobytes(), spec))
        return found

    def check(self, data: bytes, seed: Seed, rng: random.Random) -> bool:
        spec = seed.spec if seed.spec is not None and rng.random() < 0.9 else rng.choice(self.SPECS)
        payload = Payload(np.frombuffer(data, dtype=np.uint8), nonfinite=rng.random() < 0.02)
        try:
            found = self.compressor.decode(payload, self.context(spec), stats=self.stats(spec))
        except PayloadError:
            return False
        if tuple(found.shape) != spec.shape or found.dtype != spec.dtype:
            raise BrokenPromiseError(f"decoded to {found.dtype} of {tuple(found.shape)}, expected {spec}")
        self.check_other_ways(payload, spec, found, rng)
        return True

    def check_other_ways(self, payload: Payload, spec: TensorSpec, found: torch.Tensor, rng: random.Random) -> None:
        """What one way of decoding takes, the others take, too."""
        ctx, stats = self.context(spec), self.stats(spec)
        out = torch.full(spec.shape, 7, dtype=spec.dtype)
        self.compressor.decode(payload, ctx, out=out, stats=stats)
        if as_array(out).tobytes() != as_array(found).tobytes():
            raise BrokenPromiseError("decode with out= gives another result")
        self.compressor.decode(payload, ctx, out=torch.zeros(spec.shape), accumulate=True, stats=stats)
        if (
            isinstance(self.compressor, SummableCompressor) and self.shared and not payload.nonfinite
        ):  # those are not added
            lanes = np.zeros(self.compressor.accumulator_size(spec), self.compressor.accumulator_dtype(2))
            self.compressor.accumulate(payload, ctx, lanes)

    def stats(self, spec: TensorSpec) -> list[np.ndarray]:
        """What a preliminary round gave, where there was one."""
        if not self.shared:
            return []
        return [np.ones(count, np.float32) for count, _ in self.compressor.stats_spec(spec)]

    def context(self, spec: TensorSpec) -> Context:
        return Context(name="layer", step=3, rank=1, world_size=2, seed=5, spec=spec)


class PackedFloatsTarget(DecoderTarget):
    """The same for longer tensors and every element type; and what is taken is the one encoding of its tensor."""

    SPECS = tuple(
        TensorSpec((size,), dtype)
        for size in (40, 2000, 20_000)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )

    def __init__(self, compressor: str, **options: Any) -> None:
        super().__init__(compressor, **options)
        self.name += " long"

    def check_other_ways(self, payload: Payload, spec: TensorSpec, found: torch.Tensor, rng: random.Random) -> None:
        super().check_other_ways(payload, spec, found, rng)
        again = self.compressor.encode(found, self.context(spec))
        if bytes(again.body) != bytes(payload.body):
            raise BrokenPromiseError("a payload in another form than ours was taken")


class DerivedLevelsTarget(PackedFloatsTarget):
    """The same for `gcomp` where the receiver derives levels from the state of the optimizer."""

    def __init__(self) -> None:
        super().__init__("gcomp", levels="derived")

    def context(self, spec: TensorSpec) -> Context:
        parameter = torch.linspace(-1, 1, spec.numel, dtype=torch.float32).reshape(spec.shape).to(spec.dtype)
        numbers = torch.from_numpy(np.array([1, 0, 0, 0, 1 / 64, 0, 1, 0], np.float32))  # plain SGD, a rate of 1/64
        one = torch.tensor(1.0)
        aux = {"parameter": parameter, "numbers": numbers, "loss_scale": one, "common": torch.tensor(True)}
        return replace(super().context(spec), aux=aux)
