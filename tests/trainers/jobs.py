"""Small training runs with the frameworks, as many ranks as the launcher starts: ``job parameters``, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_SAMPLES, NUM_FEATURES = 64, 8


class Regression(nn.Module):
    """A linear model that returns its loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.linear(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


def huggingface(
    folder: str, method: str = "threelc", *, epochs: int = 2, seed: int = 0, resume_from: str | None = None,
    nan: bool = False, **arguments: Any,
) -> None:  # fmt: skip
    """Train with the Trainer, 4 steps per epoch of two ranks, with a checkpoint after each.

    Args:
        folder: Folder of the checkpoints.
        method: As in `gradwire.attach`.
        epochs: Number of epochs in all.
        seed: Seed of parameters and data.
        resume_from: As in `GradwireCallback`.
        nan: Whether the data, and so the gradient norms in the Trainer's log, are NaN.
        arguments: Further arguments of TrainingArguments. ``resume_from_checkpoint`` is also passed to ``train``, as
            Transformers' own scripts do.
    """
    from transformers import Trainer, TrainingArguments

    from gradwire.trainers.huggingface import GradwireCallback

    options = TrainingArguments(
        output_dir=folder, num_train_epochs=epochs, per_device_train_batch_size=8, learning_rate=0.01, optim="sgd",
        save_strategy="epoch", use_cpu=True, report_to="none", disable_tqdm=True, **arguments,
    )  # fmt: skip
    torch.manual_seed(seed)
    values = torch.randn(NUM_SAMPLES, NUM_FEATURES) * (torch.nan if nan else 1)
    trainer = Trainer(Regression(), options, train_dataset=[{"inputs": each, "labels": each} for each in values])
    trainer.add_callback(GradwireCallback(trainer, method, resume_from=resume_from))
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)


def lightning(folder: str, *, epochs: list[int], accumulate: int, log_every: int, method: str = "threelc") -> None:
    """Train with Lightning on two ranks, 32 batches each per epoch, and resume; ``logs`` has a version per run.

    Args:
        folder: Folder of the checkpoint and of the logs.
        epochs: Number of epochs in all, at the end of each run.
        accumulate: Batches per step.
        log_every: Interval in steps at which Lightning logs.
        method: Compressor. ``"gcomp"`` predicts the steps of Adam; the others train with SGD.
    """
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    from gradwire import Plan
    from gradwire.trainers.lightning import GradwireCallback

    class Regressor(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(batch[0], batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return (torch.optim.Adam if method == "gcomp" else torch.optim.SGD)(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(NUM_SAMPLES, NUM_FEATURES))
    last = Path(folder, "last.ckpt")
    for version, limit in enumerate(epochs):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=limit, default_root_dir=folder,
            callbacks=[GradwireCallback(Plan(method, min_elements=0))],
            logger=CSVLogger(folder, name="logs", version=version), accumulate_grad_batches=accumulate,
            log_every_n_steps=log_every, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regressor(), DataLoader(samples, 1), ckpt_path=str(last) if version else None)
        trainer.save_checkpoint(last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {each.__name__: each for each in (huggingface, lightning)}[sys.argv[1]](**json.loads(sys.argv[2]))
