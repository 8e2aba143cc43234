"""gradwire in the Trainer of Hugging Face Transformers: a callback.

    trainer = Trainer(model, args, train_dataset=samples)
    trainer.add_callback(GradwireCallback(trainer, "threelc"))

Checkpoints of the Trainer then have a file ``gradwire.pt`` with the residuals of all ranks, and
``trainer.train(resume_from_checkpoint=...)`` resumes from it, at any number of processes.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.sync.plan import Method, Plan
from gradwire.trainers.packages import require
from gradwire.trainers.single_process import AnyHandle, attach_unless_alone

require("transformers", "gradwire.trainers.huggingface")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

FILE_NAME = "gradwire.pt"

logger = logging.getLogger("gradwire")


class GradwireCallback(TrainerCallback):
    """Compress gradient synchronization while a Trainer trains.

    With one process it does nothing, and a line at level INFO says so.

    Args:
        trainer: The Trainer, which callbacks are not told. Its optimizer and GradScaler are used.
        method: As in `gradwire.attach`.
        log: Whether `handle.scalars` are logged when the Trainer logs its loss, as ``gradwire/...``. Those that are not
            finite are left out: the Trainer writes its log as JSON, which has no such numbers.
        resume_from: Folder of the checkpoint to take the residuals from, if it is not found: callbacks are not told the
            argument of ``train``. It is found if it is in the Trainer's ``output_dir``, or in
            ``TrainingArguments.resume_from_checkpoint``.
        options: Further arguments of `gradwire.attach`: ``fidelity``, ``check_every``, ``options``.

    Attributes:
        handle: The handle, from the start of the first training on.

    Raises:
        MissingPackageError: Transformers is missing or too old. Raised when this module is imported.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: Method | Mapping[str, Method] | Plan = "threelc",
        *,
        log: bool = True,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.handle: AnyHandle | None = None
        self.resume_from = resume_from
        self._logged_step = 0
        self._trainer, self._method, self._log, self._options = trainer, method, log, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Attach to the module that the Trainer has wrapped, and load what its checkpoint holds."""
        if self.handle is not None:
            self.handle.detach()
        trainer = self._trainer
        self.handle = attach_unless_alone(
            trainer.model_wrapped,
            self._method,
            args.world_size,
            optimizer=trainer.optimizer,
            scaler=trainer.accelerator.scaler,
            **self._options,
        )
        if self.handle.synchronizer.plan.has_velocity and args.max_grad_norm:
            logger.warning(
                "The Trainer clips to max_grad_norm=%g what it takes for gradients. With momentum correction these are "
                "velocities, up to 1 / (1 - momentum) times as large. Set max_grad_norm=0, and pass clip= to "
                "MomentumCorrection.",
                args.max_grad_norm,
            )
        self._logged_step = state.global_step
        if state.global_step:
            self._resume(self.handle, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Log scalars, once per step, when the Trainer has logged its loss.

        Not sooner: the Trainer takes any call of its ``log`` for its own, and would leave its loss out.
        """
        if not self._log or self.handle is None or "loss" not in (logs or {}) or state.global_step <= self._logged_step:
            return
        self._logged_step = state.global_step
        if numbers := {name: each for name, each in self.handle.scalars("last").items() if math.isfinite(each)}:
            self._trainer.log(numbers)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Write the states of all ranks into the checkpoint. The Trainer calls it on every rank."""
        if self.handle is None or args.save_only_model:
            return
        document = self.handle.gather_state_dict(rank0_only=not args.save_on_each_node)
        if args.should_save:
            path = _folder(args, state) / FILE_NAME
            torch.save(document, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)  # a process that is killed here leaves no partial file

    def _resume(self, handle: AnyHandle, state: TrainerState) -> None:
        given = [self.resume_from, self._trainer.args.resume_from_checkpoint]
        # For `train`, True means the last checkpoint in the Trainer's folder.
        folders = [Path(each) for each in given if each is not None and not isinstance(each, bool)]
        for folder in [*folders, _folder(self._trainer.args, state)]:
            if (folder / FILE_NAME).is_file() and _is_of(folder, state):
                handle.load_state_dict(torch.load(folder / FILE_NAME, map_location="cpu", weights_only=True))
                logger.info("Residuals of all ranks were loaded from %s.", folder / FILE_NAME)
                return
        logger.warning(
            "Training goes on from step %d without residuals: no %s was found for this checkpoint. If it has one, pass "
            "its folder, GradwireCallback(..., resume_from=folder).",
            state.global_step,
            FILE_NAME,
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _is_of(folder: Path, state: TrainerState) -> bool:
    """Whether a folder has the checkpoint of a state. Another run may have saved the same step."""
    saved = json.loads((folder / TRAINER_STATE_NAME).read_text())
    own = {"global_step": state.global_step, "log_history": state.log_history}
    return json.dumps({name: saved[name] for name in own}) == json.dumps(own)  # as text, in which NaN equals NaN
