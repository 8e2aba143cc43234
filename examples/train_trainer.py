"""Handwritten digits with the Trainer of Hugging Face Transformers. Run it again with more epochs to go on.

    torchrun --nproc-per-node 2 examples/train_trainer.py --epochs 4

Needs transformers and accelerate, and scikit-learn for the data. It also runs as one process, where gradwire does
nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from gradwire.trainers.huggingface import GradwireCallback


class Digits(nn.Module):
    """A perceptron that returns its loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    images, targets = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    samples = [{"inputs": image, "labels": label} for image, label in zip(inputs, labels)]
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_steps=20,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = Digits()
    trainer = Trainer(model, arguments, train_dataset=samples)
    callback = GradwireCallback(trainer, "threelc")
    trainer.add_callback(callback)
    last = get_last_checkpoint(str(options.folder)) if options.folder.exists() else None
    trainer.train(resume_from_checkpoint=last)  # loads the residuals of all ranks, too
    if trainer.is_world_process_zero() and callback.handle is not None:
        print(callback.handle.report())
    return model


if __name__ == "__main__":
    main()
