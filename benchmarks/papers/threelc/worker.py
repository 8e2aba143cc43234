"""A worker of `benchmarks.papers.threelc.training` on a host of the lab: trains and records losses, times and bytes."""

from __future__ import annotations

import json
import math
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn import functional

import gradwire as gw
from benchmarks.data.cifar import ResNet, accuracy, batch, load

BATCH = 32
LR, MOMENTUM, DECAY = 0.025, 0.9, 1e-4


def learning_rate(step: int, steps: int, workers: int) -> float:
    """Cosine decay without restarts from 0.025 to 0.001 per worker, after a warm-up of a twentieth of the steps."""
    warm = min(1.0, (step + 1) / max(1, steps / 20))
    decayed = 0.001 + (LR - 0.001) * (1 + math.cos(math.pi * step / steps)) / 2
    return workers * decayed * warm


def work(path: str, worker: int) -> None:
    """Run the job that a JSON file describes."""
    job = json.loads(Path(path).read_text())
    workers, steps = job["workers"], job["steps"]
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    train = load(Path(job["data"]), "train")
    model = ResNet(job["blocks"], job["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(1000 * job["seed"] + worker)
    client = gw.ParameterClient(
        model, optimizer, job["server"], compressor=job["compressor"],
        job=gw.JobOptions(worker=worker, workers=workers, seed=job["seed"], local_steps=job["local_steps"]),
        transfer=gw.TransferOptions(feedback=job["feedback"]),
        connection=gw.ConnectionOptions(insecure=True, timeout=timedelta(seconds=300)),
    )  # fmt: skip
    losses, seconds, pushed, pulled = [], [], [], []
    for step in range(steps):
        begun, before = time.monotonic(), (client.sent_bytes, client.received_bytes)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, workers)
        x, y = batch(train, torch.randint(0, len(train[1]), (BATCH,), generator=generator), generator=generator)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        client.step()
        losses.append(loss.item())
        seconds.append(time.monotonic() - begun)
        pushed.append(client.sent_bytes - before[0])
        pulled.append(client.received_bytes - before[1])
    client.close()
    compute = _compute_seconds(model, train, generator)
    said = {
        "worker": worker,
        "losses": losses,
        "seconds": seconds,
        "pushed": pushed,
        "pulled": pulled,
        "compute": compute,
    }
    if worker == 0 and job["test"]:
        said["accuracy"] = accuracy(model, load(Path(job["data"]), "test"))
    (Path(path).parent / f"worker-{worker}.json").write_text(json.dumps(said))


def _compute_seconds(
    model: torch.nn.Module, train: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator
) -> float:
    """Median step without communication, while the other workers do the same. Does not change the model."""
    found, buffers = [], {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(12):
        begun = time.monotonic()
        x, y = batch(train, torch.randint(0, len(train[1]), (BATCH,), generator=generator), generator=generator)
        functional.cross_entropy(model(x), y).backward()
        found.append(time.monotonic() - begun)
    model.load_state_dict(buffers, strict=False)
    return sorted(found)[6]
