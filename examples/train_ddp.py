"""Handwritten digits with plain DDP. Run it again with more epochs to go on from its checkpoint.

    torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 4

Needs scikit-learn, for the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire as gw


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")  # or "nccl"
    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=0)
    batches = DataLoader(samples, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = gw.attach(model, "threelc", optimizer=optimizer)

    first, path = 0, arguments.folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["gradwire"])
        first = saved["epoch"]

    loss = torch.tensor(0.0)
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        # Collective: rank 0 gets the residuals of all ranks.
        saved = {"epoch": epoch + 1, "gradwire": handle.gather_state_dict(rank0_only=True)}
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            torch.save(saved | {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if dist.get_rank() == 0:
        print(handle.report())
    handle.detach()
    dist.destroy_process_group()
    return layers


if __name__ == "__main__":
    main()
