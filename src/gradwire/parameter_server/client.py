"""A worker of parameter servers, in a plain training loop.

    client = gw.ParameterClient(model, optimizer, "10.0.0.1:7070", compressor="threelc")
    for batch, target in data:
        loss_function(model(batch), target).backward()   # pushes each gradient as soon as it is computed
        client.step()                                    # replaces optimizer.step() and zero_grad()
    client.close()

Barriers are fine-grained: pushes overlap with the backward pass, and the forward pass of a module waits only for the
parameters of that module. A part of the model may be trained by calling its modules alone. The servers run an optimizer
of the same class and keep its state. A schedule that changes the groups of the local optimizer takes effect with the
next step.

Source: 3LC (Lim, Andersen, Kaminsky 2019), sections 2.1, 3 and 4. Differences: there, one worker updates batch
normalization. Here all workers train its affine parameters, and buffers (running statistics) stay local.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core import host
from gradwire.core.errors import AttachError, OptionError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.core.torch_private import note_step
from gradwire.net.client import ConnectionOptions
from gradwire.parameter_server.arguments import (
    check_options,
    class_name,
    hyperparameters,
    joined_kind,
    log_notes,
    one_optimizer,
    parameter_config,
)
from gradwire.parameter_server.chunks import ELEMENT_WISE, ParameterChunk, assign, join_vectors, split
from gradwire.parameter_server.connection import ServerConnection
from gradwire.parameter_server.encoder_thread import EncoderThread
from gradwire.parameter_server.forward_pulls import ForwardPulls
from gradwire.parameter_server.options import JobOptions, Methods, TransferOptions, server_addresses
from gradwire.parameter_server.report import ParameterReport, late_share
from gradwire.parameter_server.session import TrainingConfig, TrainingJoin
from gradwire.parameter_server.slot import ParameterSlot

logger = logging.getLogger("gradwire")
_STEP = "gradwire.step"  # in a saved state, next to names of parameters
_Placed = tuple[ParameterChunk, ServerConnection, ParameterSlot]
"""A chunk, the connection to the server that keeps it, and its slot there."""


class ParameterClient:
    """Pushes the gradients of a model to parameter servers and pulls the updates.

    Args:
        model: Model to train. All workers start with the parameters of worker 0.
        optimizer: Optimizer of the parameters that require gradients. It is never stepped here: the servers step one
            of the same class.
        servers: Addresses of the servers as ``host:port``, in the same order on all workers. The servers share the
            model. Default: the variable ``GRADWIRE_SERVERS``, separated by commas.
        compressor: Compressor of gradients and updates: a name, with options as in ``"threelc:sparsity=1.75"``, an
            instance, or a dictionary by parameter name pattern.
        pull: Compressor of updates, if it is a different one.
        job: Name of the job, id and number of workers.
        transfer: How gradients and updates are encoded, and when they travel.
        connection: Key and timeouts.

    Raises:
        UnknownNameError, OptionTypeError: See `Plan`.
        OptionError: A number is out of range, no server is given, or a hyperparameter cannot be sent.
        AttachError: The optimizer lacks parameters of the model.
        SyncError: A server is not there, or refuses this worker.
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
        job: JobOptions = JobOptions(),
        transfer: TransferOptions = TransferOptions(),
        connection: ConnectionOptions = ConnectionOptions(),
    ) -> None:
        check_options("job", job, JobOptions)
        check_options("transfer", transfer, TransferOptions)
        check_options("connection", connection, ConnectionOptions)
        self.model = model
        self.optimizer = one_optimizer(optimizer)
        self.worker, self.workers = job.resolve()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._job = job
        self._overlap = transfer.overlap and job.local_steps == 1
        self._pushing = True
        self._micro_step = 0
        self._finished = False
        self._pushed: dict[str, torch.Tensor | None] = {}  # gradients of this step, by parameter
        self._groups = hyperparameters(self.optimizer)  # as the servers have them
        addresses = server_addresses(servers)
        plan = transfer.plan(compressor)
        pull_plan = plan if pull is None else transfer.plan(pull)
        if self.worker == 0:
            log_notes({name: TensorSpec.of(each) for name, each in self._parameters.items()}, plan, pull_plan)

        optimizer_name = class_name(self.optimizer)
        configured = partial(
            parameter_config, parameters=self._parameters, optimizer=self.optimizer, plan=plan, pull_plan=pull_plan
        )
        is_element_wise = optimizer_name in ELEMENT_WISE
        elements = transfer.chunk_elements if is_element_wise else sys.maxsize
        all_chunks = split(self._parameters, elements)
        if is_element_wise and transfer.join_vectors:
            all_chunks = join_vectors(
                all_chunks, self._parameters, elements, lambda chunk: joined_kind(configured(chunk))
            )
        shares = assign(all_chunks, self._parameters, len(addresses))
        incarnation = secrets.randbits(62)
        self._connections: list[ServerConnection] = []
        self._placed: dict[str, list[_Placed]] = {name: [] for name in self._parameters}
        for address, chunks in zip(addresses, shares):
            tensors = tuple(configured(chunk) for chunk in chunks)
            config = TrainingConfig(
                self.workers, job.backups, job.seed, optimizer_name, tensors, job.staleness, job.late
            )
            values = {chunk.name: chunk.of(self._parameters).detach() for chunk in chunks}
            join = TrainingJoin(config, self._groups, incarnation)
            server = ServerConnection(address, join, self.worker, job.name, connection, values)
            self._connections.append(server)
            for chunk, slot in zip(chunks, server.slots):
                for name in chunk.parameters:
                    self._placed[name].append((chunk, server, slot))
        self._slots = [slot for server in self._connections for slot in server.slots]
        self._encoder = EncoderThread(self._encoder_failed)
        self._pulls = ForwardPulls(self._parameters, self._before_forward, self._pull)
        self._hooks: list[Any] = []
        try:
            for server in self._connections:
                server.start()
            for server in self._connections:
                server.wait_for_values()
            self._step = min(slot.newest for slot in self._slots)
            self.wait()
            self._pulls.install(model, fine_grained=transfer.fine_grained)
            for name, parameter in self._parameters.items() if self._overlap else ():
                add = parameter.register_post_accumulate_grad_hook
                self._hooks.append(add(self._after_grad(name)))  # type: ignore[no-untyped-call]
        except BaseException:
            self.close(reason="This worker could not start.")
            raise

    # -- what a training loop calls --------------------------------------------------------------------------

    def step(self) -> bool:
        """End a step: push the gradients that were not pushed yet, and drop all gradients.

        Returns:
            Whether the job goes on. See `finished`.

        Raises:
            SyncError: A server has been lost for longer than the timeout, or has given up.
        """
        self._check_servers()
        self._micro_step += 1
        if self._micro_step % self._job.local_steps:
            return not self.finished  # gradients accumulate in .grad
        for name, parameter in self._parameters.items():
            if name not in self._pushed:
                self._push(name, parameter.grad)
        self._encoder.check()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._pushed.clear()
        self._step += 1
        note_step(self.optimizer)
        self._pulls.mark_outdated()
        return not self.finished

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes, as `DistributedDataParallel.no_sync` does."""
        before, self._pushing = self._pushing, False
        try:
            yield
        finally:
            self._pushing = before

    def wait(self) -> None:
        """Bring all parameters up to date, whatever the staleness. Otherwise, the forward pass does this by itself.

        All workers then have the same parameters after the same number of steps.

        Raises:
            SyncError: A server has been lost for longer than the timeout, or has given up.
        """
        self._check_servers()
        self._encoder.drain(self._check_servers)
        self._catch_up()
        for name in self._parameters:
            self._pull(name, staleness=0)
        self._pulls.pull_all()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Residuals of this worker by parameter name: float32, of the parameter's shape. Empty ones are left out.

        The entry ``"gradwire.step"`` is the number of steps of the job so far.
        """
        self.wait()
        state = {_STEP: host.tensor(self._step, torch.int64)}
        for name, placed in self._placed.items():
            if any(slot.residual is not None for _, _, slot in placed):
                state[name] = host.zeros(self._parameters[name].shape)
        for chunk, slot in self._chunks():
            if slot.residual is not None:
                chunk.write(torch.from_numpy(slot.residual), state)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the residuals that an earlier process of this worker has saved.

        A residual travels with the next push. If that process had pushed a parameter again after it saved, what it has
        saved of it was applied, so it is not loaded, and a warning says so.

        Args:
            state: Residuals by parameter name, on any device. Parameters without one keep theirs.

        Raises:
            OptionError: The model has no parameter of this name and shape. Nothing has changed.
            SyncError: A server has been lost for longer than the timeout, or has given up.
        """
        state = dict(state)
        step = int(state.pop(_STEP, host.tensor(sys.maxsize, torch.int64)))
        for name, residual in state.items():
            if name not in self._placed or residual.shape != self._parameters[name].shape:
                raise OptionError(
                    f"The state has a residual of {name!r} with shape {tuple(residual.shape)}, which is no parameter "
                    "of this model. Load the state of the same model."
                )
        self.wait()  # the encoder thread uses the residuals until then
        loaded = {name: residual.detach().cpu().to(torch.float32) for name, residual in state.items()}
        applied: set[str] = set()
        for chunk, slot in self._chunks():
            if slot.has_pushed_since(step):
                applied |= loaded.keys() & chunk.parameters
            elif loaded.keys() & chunk.parameters:
                residuals = {name: host.zeros(self._parameters[name].shape) for name in chunk.parameters}
                if slot.residual is not None:
                    chunk.write(torch.from_numpy(slot.residual), residuals)
                slot.residual = chunk.of(residuals | loaded).reshape(-1).numpy().copy()
        if applied:
            logger.warning(
                "Residuals of %d parameters, such as %r, were saved after %d steps, and this worker has pushed since: "
                "they were applied then, and are not loaded. Save state_dict() after each step that may be the last.",
                len(applied), min(applied), step,
            )  # fmt: skip

    @property
    def finished(self) -> bool:
        """Whether the job has finished without this worker.

        With backups, this happens when too few workers have batches left to close a step. Further steps change
        nothing, and their gradients are not counted.
        """
        return self._finished or any(server.finished for server in self._connections)

    @property
    def steps(self) -> int:
        """Steps of the job so far, including those of earlier processes of this worker."""
        return self._step

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent so far, headers included."""
        return sum(server.sent_bytes for server in self._connections)

    @property
    def received_bytes(self) -> int:
        """Bytes of frames received so far, headers included."""
        return sum(server.received_bytes for server in self._connections)

    def report(self) -> ParameterReport:
        """What this worker has sent, received and lost so far, up to the updates that the model has."""
        share = late_share(self._slots)
        return ParameterReport(self._step, self.sent_bytes, self.received_bytes, share, self._job.late)

    def close(self, reason: str = "") -> None:
        """Bring the model up to date and leave the job. Idempotent.

        Args:
            reason: Why this worker leaves early; sent to the servers.
        """
        if not self._connections:
            return
        try:
            if not reason:
                self.wait()
        except BaseException as error:  # this worker has not finished
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._finished = self.finished
            self._pulls.remove()
            for hook in self._hooks:
                hook.remove()
            self._encoder.close()
            for server in self._connections:
                server.close(reason)
            self._connections = []

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(reason="" if error is None else f"{type(error).__name__}: {error}")

    # -- push and pull ---------------------------------------------------------------------------------------

    def _after_grad(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if self._pushing:
                if name in self._pushed:
                    raise AttachError(
                        f"The gradient of {name!r} was computed a second time in one step. Run all backward passes "
                        "but the last under client.no_sync(), or pass transfer=TransferOptions(overlap=False)."
                    )
                self._push(name, parameter.grad)

        return hook

    def _push(self, name: str, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._pulls.pull(name)  # a module was called without the model
        elif self._pulls.is_outdated(name):
            raise AttachError(
                f"The gradient of {name!r} was computed with the values of an earlier step: neither the model nor the "
                "module that owns it was called. Call client.wait() before you read parameters without either."
            )
        if not self._pushed:
            self._send_groups()
        self._pushed[name] = grad
        for chunk, server, slot in self._placed[name]:
            if chunk.is_complete(self._pushed):
                self._encoder.submit(partial(server.push, slot, chunk.gradient(self._pushed), self._step))

    def _send_groups(self) -> None:
        groups = hyperparameters(self.optimizer)
        if groups != self._groups:
            self._groups = groups
            for server in self._connections:
                self._encoder.submit(partial(server.send_groups, groups))

    def _before_forward(self) -> None:
        self._encoder.check()
        if all(parameter.grad is None for parameter in self._parameters.values()):
            self._catch_up()  # otherwise, gradients of the old step accumulate

    def _encoder_failed(self, error: SyncError) -> None:
        """Wake whoever waits for an update that this worker was to contribute to."""
        for server in self._connections:
            server.failed(error)

    def _check_servers(self) -> None:
        for server in self._connections:
            server.check()

    def _catch_up(self) -> None:
        """Skip the steps that were closed without this worker.

        A worker pushes for a step only when it has all updates before it, but for the staleness. If any update of this
        step has arrived, those are therefore on their way.
        """
        newest = max(slot.newest for slot in self._slots)
        step = newest if self.finished else newest - 1 - self._job.staleness
        if step > self._step:
            self._step = step
            self._pulls.mark_outdated()

    def _pull(self, name: str, staleness: int | None = None) -> None:
        allowed = self._job.staleness if staleness is None else staleness
        for chunk, server, slot in self._placed[name]:
            if chunk.is_joined and slot.version >= self._step:
                continue  # pulled with another of its vectors
            own = {each: self._parameters[each].data for each in chunk.parameters}
            values = chunk.of(own)
            server.pull(slot, values, self._step, staleness=allowed)
            if chunk.is_joined:
                chunk.write(values, own)

    def _chunks(self) -> Iterator[tuple[ParameterChunk, ParameterSlot]]:
        """All chunks with their slots."""
        for name, placed in self._placed.items():
            for chunk, _, slot in placed:
                if chunk.parameters[0] == name:
                    yield chunk, slot
