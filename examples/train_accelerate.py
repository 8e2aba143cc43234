"""Handwritten digits with Hugging Face Accelerate. Run it again with more epochs to go on from its checkpoint.

    accelerate launch --num_processes 2 --cpu examples/train_accelerate.py --epochs 4

Needs accelerate, and scikit-learn for the data. It also runs as one process, where gradwire does nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()

    # A seedable sampler makes the order of an epoch the same in a resumed run.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(samples, 32, shuffle=True))
    handle = gw.trainers.accelerate.attach(accelerator, model, "threelc", optimizer=optimizer)

    first, state = 0, arguments.folder / "state"
    if state.exists():
        accelerator.load_state(str(state))  # loads the residuals of all ranks, too
        first = json.loads((arguments.folder / "epoch.json").read_text())

    loss = torch.tensor(0.0)
    for epoch in range(first, arguments.epochs):
        batches.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        accelerator.save_state(str(state))
        if accelerator.is_main_process:
            (arguments.folder / "epoch.json").write_text(json.dumps(epoch + 1))
        accelerator.wait_for_everyone()
    accelerator.print(handle.report())
    handle.detach()
    accelerator.end_training()
    trained: nn.Module = accelerator.unwrap_model(model)
    return trained


if __name__ == "__main__":
    main()
