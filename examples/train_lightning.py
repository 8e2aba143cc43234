"""Handwritten digits with PyTorch Lightning. Run it again with more epochs to go on from its checkpoint.

    torchrun --nproc-per-node 2 examples/train_lightning.py --epochs 4

Needs lightning, and scikit-learn for the data. It also runs as one process, where gradwire does nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.trainers.lightning import GradwireCallback


class Digits(LightningModule):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    callback = GradwireCallback("threelc")
    trainer = Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy="ddp" if num_processes > 1 else "auto",
        max_epochs=options.epochs,
        default_root_dir=options.folder,
        callbacks=[callback, ModelCheckpoint(options.folder, filename="last", enable_version_counter=False)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(options.folder, name="logs"),  # has the scalars of gradwire, too
        log_every_n_steps=20,
    )
    torch.manual_seed(0)
    model, last = Digits(), options.folder / "last.ckpt"
    # Loads the residuals of all ranks, too.
    trainer.fit(model, DataLoader(samples, 32, shuffle=True), ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero and callback.handle is not None:
        print(callback.handle.report())
    return model


if __name__ == "__main__":
    main()
