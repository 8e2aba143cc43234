"""Golden payloads: the exact bytes of every compressor, so that every change of a format is seen.

Update them, after a deliberate change and with an entry in CHANGELOG.md, with

    python -m tests.golden.payloads.golden

There is one file per compressor. It has the body of one seeded gradient for each option set, in hexadecimal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec

FOLDER = Path(__file__).parent
OPTION_SETS: dict[str, list[dict]] = {
    "int8": [{}, {"block": 16, "stochastic": False}],
    "int8shared": [{"block": 16}],
    "lossless": [{}, {"code": "fixed"}],
    "powersgd": [{"rank": 2}, {"rank": 8}],
    "ternary": [{}, {"sparsity": 1.75}, {"zero_run": True}, {"sparsity": 1.75, "fit": True}],
    "thc": [{"granularity": 30, "block": 64}, {"bits": 3, "rotate": "full"}],
    "topk": [{}, {"ratio": 0.1}],
    "threelc": [{}, {"sparsity": 1.75}, {"zero_run": False}],
    "uthc": [{"block": 64}, {"bits": 8, "rotate": "none"}],
}
CONTEXT = Context("golden.weight", step=5, rank=2, world_size=4, seed=11, offset=64)


def gradient(codec: Compressor) -> torch.Tensor:
    """103 elements, or a matrix, computed from integers so that they do not depend on a generator's version."""
    index = np.arange(103, dtype=np.int64)
    steps = (index * index * 2654435761 >> 7) % 2001 - 1000
    values = steps.astype(np.float32) / np.float32(1024)
    values[20:60] /= 64
    values[40:44] = 0
    return torch.from_numpy(values[:96].reshape(8, 12) if codec.requires_full_tensor else values)


def state() -> dict[str, torch.Tensor]:
    """`Context.aux` of plain SGD, with a learning rate of 1/64."""
    numbers = torch.tensor([1, 0, 0, 0, 1 / 64, 0, 1, 0], dtype=torch.float32)
    parameter = torch.from_numpy((np.arange(103) % 17 - 8).astype(np.float32) / np.float32(32))
    return {
        "parameter": parameter, "numbers": numbers, "loss_scale": torch.tensor(1.0), "common": torch.tensor(True),
    }  # fmt: skip


def codecs() -> list[Compressor]:
    return [
        compressors.make(name, **options) for name in compressors.names() for options in OPTION_SETS.get(name, [{}])
    ]


def cases(name: str) -> dict[str, tuple[Compressor, Context]]:
    """Every option set of a compressor, and each with the state of an optimizer if it needs one."""
    found = {}
    for codec in codecs():
        if codec.name == name:
            found[repr(codec)] = codec, CONTEXT
            if codec.needs_optimizer:
                found[f"{codec!r} with a state"] = codec, replace(CONTEXT, aux=state())
    return found


def render(name: str) -> str:
    """The content of a compressor's file."""
    lines = []
    for title, (codec, ctx) in cases(name).items():
        lines.append(f"{title}, wire code {compressors.code(name)}")
        body = bytes(codec.encode(gradient(codec), ctx).body)
        lines += [body[start : start + 32].hex() for start in range(0, len(body), 32)]
    return "\n".join(lines) + "\n"


def read(name: str) -> dict[str, bytes]:
    """Bodies by option set, from the file."""
    bodies: dict[str, bytes] = {}
    title = ""
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if "," in line:
            title = line.rsplit(", ", 1)[0]
            bodies[title] = b""
        else:
            bodies[title] += bytes.fromhex(line)
    return bodies


def spec(codec: Compressor) -> TensorSpec:
    return TensorSpec.of(gradient(codec))


if __name__ == "__main__":
    for known in compressors.names():
        (FOLDER / f"{known}.txt").write_text(render(known))
        print(f"wrote {known}.txt")
