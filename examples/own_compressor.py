"""A compressor of your own, trained with on handwritten digits. Run it again with more epochs to go on.

    torchrun --nproc-per-node 2 examples/own_compressor.py --epochs 4
    gradwire check examples/own_compressor.py:blocks3      # the contract that every compressor keeps
    gradwire show examples/own_compressor.py:blocks3       # the code that is generated from it

Needs scikit-learn, for the data. docs/extend.md explains the language.
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
from gradwire.lang import concat, mean, round_even, trit


@gw.compressor  # biased, so with error feedback
def blocks3(g: Any, block: int = 64) -> Any:
    """Each element becomes -1, 0 or 1 times the mean magnitude of its block: 2.1 bits per element."""
    scale = abs(g).blocks(block).reduce(mean)
    return concat(scale=scale, q=g.map(lambda x: round_even(x / scale), dtype=trit))


@blocks3.decode
def _(p: Any) -> Any:
    return p.q * p.scale


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=0)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gw.attach(model, blocks3(block=32), optimizer=optimizer) as handle:  # or its name, "blocks3"
        first, path = 0, arguments.folder / "checkpoint.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True)
            layers.load_state_dict(saved["model"])
            handle.load_state_dict(saved["gradwire"])
            first = saved["epoch"]
        for epoch in range(first, arguments.epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in DataLoader(samples, batch_size=32, sampler=sampler):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            saved = {"epoch": epoch + 1, "gradwire": handle.gather_state_dict(rank0_only=True)}
            if dist.get_rank() == 0:
                torch.save(saved | {"model": layers.state_dict()}, path)
        if dist.get_rank() == 0:
            print(handle.report())
    dist.destroy_process_group()
    return layers


if __name__ == "__main__":
    main()
