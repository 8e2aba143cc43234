"""gradwire in PyTorch Lightning: a callback.

    trainer = Trainer(strategy="ddp", devices=4, callbacks=[GradwireCallback("threelc")])

Lightning's checkpoints then hold the residuals of all ranks, and ``fit(ckpt_path=...)`` resumes from them, at any
number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.ddp.gathered import Document
from gradwire.sync.plan import Method, Plan
from gradwire.trainers.packages import require
from gradwire.trainers.single_process import AnyHandle, attach_unless_alone

require("lightning", "gradwire.trainers.lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class GradwireCallback(Callback):
    """Compress gradient synchronization while Lightning trains with ``strategy="ddp"``.

    With one process it does nothing, and a line at level INFO says so.

    Args:
        method: As in `gradwire.attach`.
        log: Whether `handle.scalars` are logged every ``log_every_n_steps`` steps of the optimizers, as
            ``gradwire/...``.
        options: Further arguments of `gradwire.attach`: ``fidelity``, ``check_every``, ``options``.

    Attributes:
        handle: The handle, from the start of the first training on. It stays attached when the training has ended, for
            its report and for checkpoints that are saved then.

    Raises:
        MissingPackageError: Lightning is missing or too old. Raised when this module is imported.
    """

    def __init__(
        self, method: Method | Mapping[str, Method] | Plan = "threelc", *, log: bool = True, **options: Any
    ) -> None:
        self.handle: AnyHandle | None = None
        self._method, self._log, self._options = method, log, options
        self._module: object = None  # kept, since a module that is dropped closes its handle
        self._loaded: Document | None = None
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module that Lightning has wrapped, and load what its checkpoint held."""
        if self.handle is not None:
            self.handle.detach()
        module = trainer.strategy.model
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle, self._module = (
            attach_unless_alone(
                module, self._method, trainer.world_size, optimizer=trainer.optimizers, scaler=scaler, **self._options
            ),
            module,
        )
        self._logged_step = trainer.global_step
        if self._loaded is not None:
            self.handle.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log scalars, on rank 0."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if not self._log or self.handle is None or not trainer.is_global_zero or not every:
            return
        # A step may take many batches, and a batch may have a step of each optimizer.
        if step // every > self._logged_step // every:
            self._logged_step = step
            numbers = self.handle.scalars("last")
            for each in trainer.loggers if numbers else []:
                each.log_metrics(numbers, step=step)

    def state_dict(self) -> dict[str, Any]:
        """States of all ranks, for a checkpoint. Lightning calls it on every rank."""
        return {} if self.handle is None else self.handle.gather_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint held until the module is wrapped."""
        self._loaded = state_dict
