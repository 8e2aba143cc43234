"""A worker of parameter servers in a plain training loop.

    client = gw.ParameterClient(model, optimizer, "10.0.0.1:7070", compressor="threelc")
    for batch, target in data:
        loss_function(model(batch), target).backward()   # each gradient goes as soon as it is there
        client.step()                                    # in place of optimizer.step() and zero_grad()
    client.close()

Barriers are fine-grained: pushes overlap with the backward; each module's forward waits for its own parameters alone.
The optimizer's class and hyper-parameters go to the servers, which keep its state; a schedule that changes the groups
of the user's own optimizer object reaches them with the next step.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 2.1, 3 and 4. Differences: buffers (running statistics) stay each
worker's own, where there one worker updates batch normalization; its affine parameters are trained by all.
"""

# Shapes: n = workers, S = servers.

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.compressors.base.registry import spec_of
from gradwire.core.errors import AttachError, OptionError
from gradwire.core.spec import TensorSpec
from gradwire.core.torch_private import note_step
from gradwire.parameter_server.arguments import (
    Methods,
    addresses_of,
    class_name,
    hyper_parameters,
    log_notes,
    number,
    one_optimizer,
)
from gradwire.parameter_server.connection import ServerConnection
from gradwire.parameter_server.encoder_thread import EncoderThread
from gradwire.parameter_server.session import Groups, ParameterConfig, TrainingConfig
from gradwire.parameter_server.slices import ELEMENT_WISE, ParameterSlice, cut, share
from gradwire.parameter_server.slot import ParameterSlot
from gradwire.sync.plan import Plan


class ParameterClient:
    """A worker: pushes a model's gradients to parameter servers and pulls the changes.

    Args:
        model: its parameters that require gradients are trained; worker 0's values are where all begin.
        optimizer: of those parameters, never stepped here: the servers step one of its class.
        servers: ``host:port``, one or several, the same in the same order at all workers; each keeps a part of the
            model. Default: `GRADWIRE_SERVERS`, separated by commas.
        compressor: of gradients and changes: a name, with options as in ``"threelc:sparsity=1.75"``, an instance, or
            patterns as in a plan.
        pull: of changes, where it is another.
        worker: id of this worker, 0 to n - 1; default `RANK`.
        workers: how many there are; default `WORLD_SIZE`.
        backups: so many workers may miss a step without holding it up; they keep their gradients.
        local_steps: gradients are accumulated over so many steps, and then pushed.
        min_elements: smaller tensors, and all vectors, are not compressed.
        piece_elements: larger parameters travel in pieces of whole rows, each with a context of its own, where the
            optimizer treats every element by itself.
        feedback: whether what a payload loses is made up for later; None leaves it to the compressor.
        overlap: whether gradients go as soon as they are there. False sends them in `step`, after clipping and scaling.
        fine_grained: whether each module's forward waits for its own parameters alone. Pass False for a model that
            reads a module's parameters before it calls that module.
        seed: of the random streams.
        job: name of the job, as the servers have it.
        key_file: see `gradwire.net.keys.job_key`.
        insecure: see there.
        timeout: how long a server may be silent, or not be there.
        stall_timeout: how long an update may take to come from a server that is there; longer than the servers wait for
            workers, so that they can say which one it is.

    Raises:
        UnknownNameError, OptionTypeError: see `Plan`.
        OptionError: a number out of range, no server, or hyper-parameters that do not travel.
        AttachError: the optimizer does not have the model's parameters.
        SyncError: the servers are not there, or refuse.
    """

    @names_unknown_arguments
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        servers: str | Sequence[str] | None = None,
        *,
        compressor: Methods = "threelc",
        pull: Methods | None = None,
        worker: int | None = None,
        workers: int | None = None,
        backups: int = 0,
        local_steps: int = 1,
        min_elements: int = 1024,
        piece_elements: int = 1 << 15,
        feedback: bool | None = None,
        overlap: bool = True,
        fine_grained: bool = True,
        seed: int = 0,
        job: str = "gradwire",
        key_file: str | Path | None = None,
        insecure: bool = False,
        timeout: timedelta = timedelta(seconds=120),
        stall_timeout: timedelta = timedelta(seconds=1800),
    ) -> None:
        self.model = model
        self.optimizer = one_optimizer(optimizer)
        self.worker = number("worker", worker, "RANK")
        self.workers = number("workers", workers, "WORLD_SIZE")
        if not 0 <= self.worker < self.workers or not 0 <= backups < self.workers or local_steps < 1:
            raise OptionError(
                f"Expected a worker below {self.workers}, fewer backups, and 1 local step or more, got worker "
                f"{self.worker}, {backups} backups, {local_steps} local steps."
            )
        self._overlap = overlap and local_steps == 1
        self._fine_grained = fine_grained
        self._local_steps = local_steps
        self._pushing = True
        self._micro_step = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        addresses = addresses_of(servers)
        policy = {None: None, True: "error", False: "none"}[feedback]
        plan = Plan(compressor, min_elements=min_elements, feedback=policy)
        pull_plan = plan if pull is None else Plan(pull, min_elements=min_elements, feedback=policy)
        if self.worker == 0:
            log_notes({name: TensorSpec.of(each) for name, each in self._parameters.items()}, plan, pull_plan)
        optimizer_name = class_name(self.optimizer)
        elements = piece_elements if optimizer_name in ELEMENT_WISE else sys.maxsize
        incarnation = time.time_ns()
        self._finished = False
        self._lines: list[ServerConnection] = []
        self._homes: dict[str, list[tuple[ParameterSlice, ServerConnection, ParameterSlot]]] = {
            name: [] for name in self._parameters
        }
        for address, pieces in zip(addresses, share(cut(self._parameters, elements), self._parameters, len(addresses))):
            terms = tuple(self._terms(piece, plan, pull_plan) for piece in pieces)
            agreement = TrainingConfig(self.workers, backups, seed, optimizer_name, terms)
            parts = {piece.name: piece.of(self._parameters[piece.parameter].data) for piece in pieces}
            line = ServerConnection(
                address, agreement, self.worker, job, incarnation, timeout, stall_timeout,
                groups=self._groups(), values=parts.__getitem__, key_file=key_file, insecure=insecure,
            )  # fmt: skip
            self._lines.append(line)
            for piece, slot in zip(pieces, line.slots):
                self._homes[piece.parameter].append((piece, line, slot))
        self._slots = [slot for line in self._lines for slot in line.slots]
        self._coder = EncoderThread()
        self._told = self._groups()
        self._pushed: set[str] = set()
        self._behind: set[str] = set(self._parameters)
        self._covered: set[str] = set()
        self._seen: set[str] = set()
        self._hooks: list[Any] = []
        try:
            for line in self._lines:
                line.start()
            for line in self._lines:
                line.wait_for_values()
            self._step = min(slot.known for slot in self._slots)
            self.wait()
            self._install()
        except BaseException:
            self.close(reason="This worker could not start.")
            raise

    # -- what a training loop calls --------------------------------------------------------------------------

    def step(self) -> bool:
        """End a step: push what has not gone yet, and drop the gradients.

        Returns:
            Whether the job goes on: see `finished`.

        Raises:
            SyncError: a server is lost for longer than the timeout, or has given up.
        """
        self._micro_step += 1
        if self._micro_step % self._local_steps:
            return not self.finished  # unsent gradients accumulate in .grad
        for name, parameter in self._parameters.items():
            if name not in self._pushed:
                self._push(name, parameter.grad)
        self._coder.check()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._pushed.clear()
        self._step += 1
        note_step(self.optimizer)
        self._behind = set(self._parameters)
        return not self.finished

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the backwards inside, as `DistributedDataParallel.no_sync` does."""
        before, self._pushing = self._pushing, False
        try:
            yield
        finally:
            self._pushing = before

    def wait(self) -> None:
        """Bring all parameters up to date; a forward does so by itself.

        Raises:
            SyncError: a server is lost for longer than the timeout, or has given up.
        """
        self._coder.drain()
        self._catch_up()
        for name in list(self._behind):
            self._pull(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this worker has kept back, by parameter name: float32, only where there is something."""
        self.wait()
        found = {}
        for name, homes in self._homes.items():
            if any(slot.residual is not None for _, _, slot in homes):
                found[name] = torch.zeros(self._parameters[name].shape)
                for piece, _, slot in homes:
                    if slot.residual is not None:
                        piece.of(found[name]).reshape(-1).copy_(torch.from_numpy(slot.residual))
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take up what an earlier process of this worker has kept back.

        Raises:
            OptionError: a name or a shape that this model does not have.
        """
        for name, kept in state.items():
            if name not in self._homes or kept.shape != self._parameters[name].shape:
                raise OptionError(
                    f"Expected residuals of this model's parameters, got {name!r} of {tuple(kept.shape)}."
                )
        for name, kept in state.items():
            for piece, _, slot in self._homes[name]:
                slot.residual = piece.of(kept).to(torch.float32).reshape(-1).numpy().copy()

    @property
    def finished(self) -> bool:
        """Whether the job has finished without this worker.

        With backups, so many others have no batches left that no step can be closed any more. Further steps change
        nothing, and their gradients count nowhere.
        """
        return self._finished or any(line.finished for line in self._lines)

    @property
    def steps(self) -> int:
        """Steps of the job that this worker has passed, those of earlier processes among them."""
        return self._step

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent so far, headers included."""
        return sum(line.sent_bytes for line in self._lines)

    @property
    def received_bytes(self) -> int:
        """Bytes of frames received so far, headers included."""
        return sum(line.received_bytes for line in self._lines)

    def close(self, reason: str = "") -> None:
        """Bring the model up to date, say goodbye and end. Idempotent.

        Args:
            reason: why the job ends before its time; the servers are told.
        """
        if not self._lines:
            return
        try:
            if not reason:
                self.wait()
        except BaseException as error:  # no goodbye: this worker has not finished
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._finished = self.finished
            for hook in self._hooks:
                hook.remove()
            self._coder.close()
            for line in self._lines:
                line.close(reason)
            self._lines = []

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(reason="" if error is None else f"{type(error).__name__}: {error}")

    # -- push ------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        owners: dict[torch.nn.Module, list[str]] = {}
        names = {parameter: name for name, parameter in self._parameters.items()}
        for module in self.model.modules():
            owned = [names[p] for p in module.parameters(recurse=False) if p in names]
            if owned and module is not self.model:
                owners[module] = owned
        self._hooks.append(self.model.register_forward_pre_hook(self._before_forward))
        self._hooks.append(self.model.register_forward_hook(self._after_forward))
        for module, owned in owners.items() if self._fine_grained else ():
            self._hooks.append(module.register_forward_pre_hook(self._before_module(owned)))
        for name, parameter in self._parameters.items() if self._overlap else ():
            hook = parameter.register_post_accumulate_grad_hook(self._after_grad(name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _after_grad(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if self._pushing:
                if name in self._pushed:
                    raise AttachError(
                        f"Expected one backward a step, got a second gradient of {name!r}. Do: put all backwards but "
                        "the last under client.no_sync(), or pass overlap=False."
                    )
                self._push(name, parameter.grad)

        return hook

    def _push(self, name: str, grad: torch.Tensor | None) -> None:
        if not self._pushed:
            self._tell_groups()
        self._pushed.add(name)
        for piece, line, slot in self._homes[name]:
            self._coder.submit(partial(line.push, slot, None if grad is None else piece.of(grad), self._step))

    def _tell_groups(self) -> None:
        groups = self._groups()
        if groups != self._told:
            self._told = groups
            for line in self._lines:
                self._coder.submit(partial(line.tell, groups))

    # -- pull ------------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._coder.check()
        self._catch_up()
        for name in self._behind - self._covered:  # read elsewhere than in the forward of the module that owns them
            self._pull(name)
        self._seen.clear()

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        first = not self._covered
        self._covered = self._seen.copy() if first else self._covered & (self._seen | self._behind)
        for name in list(self._behind):
            self._pull(name)

    def _before_module(self, owned: Sequence[str]) -> Callable[[torch.nn.Module, Any], None]:
        def hook(module: torch.nn.Module, inputs: Any) -> None:
            for name in owned:
                self._pull(name)
                self._seen.add(name)

        return hook

    def _catch_up(self) -> None:
        """Skip the steps that were closed without this worker.

        Whoever has pushed for a step had all updates before it: to those, this worker can go without being waited for.
        """
        newest = max(slot.known for slot in self._slots)
        self._step = max(self._step, newest - 1)

    def _pull(self, name: str) -> None:
        if name in self._behind:
            for piece, line, slot in self._homes[name]:
                line.pull(slot, piece.of(self._parameters[name].data), self._step)
            self._behind.discard(name)

    # -- agreement -------------------------------------------------------------------------------------------

    def _terms(self, piece: ParameterSlice, plan: Plan, pull_plan: Plan) -> ParameterConfig:
        name, parameter = piece.parameter, self._parameters[piece.parameter]
        push, pull = (each.entry(name, TensorSpec.of(parameter)) for each in (plan, pull_plan))
        spec = TensorSpec.of(piece.of(parameter))
        for index, group in enumerate(self.optimizer.param_groups):
            if any(parameter is each for each in group["params"]):
                return ParameterConfig(
                    piece.name, spec.shape, str(spec.dtype).removeprefix("torch."), spec_of(push.compressor),
                    spec_of(pull.compressor), index, push.feedback != "none", pull.feedback != "none" or
                    pull.compressor.exact,
                )  # fmt: skip
        raise AttachError(
            f"Expected an optimizer of all parameters that require gradients, got one without {name!r}. Do: build it "
            "from model.parameters(), or freeze that parameter with requires_grad_(False)."
        )

    def _groups(self) -> Groups:
        return hyper_parameters(self.optimizer)
