"""The handle where one process is the whole job: what it says, and what it takes. Several ranks: tests/integration."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.core.errors import AttachError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(inputs)
        return result


def step_often(call: nn.Module, ddp: DistributedDataParallel, **options: bool) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer, **options)  # type: ignore[arg-type]
    call(torch.ones(5, 4, dtype=next(ddp.parameters()).dtype)).sum().backward()
    for _ in range(4):
        optimizer.step()
    handle.detach()


def test_an_optimizer_that_steps_without_an_averaged_backward_is_told_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    step_often(ddp.module, ddp)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    step_often(ddp.half(), ddp)
    ddp = DistributedDataParallel(Branches())
    step_often(ddp, ddp)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    step_often(ddp, ddp, register=False)
    called, converted, unused, hook = (record.message for record in caplog.records)
    for message in (called, converted, unused, hook):
        assert "Call the DDP module, not the model in it." in message
    assert "Convert the model's dtype before DDP wraps it" in called
    assert "Convert the model's dtype before DDP wraps it" in converted
    assert "Use 'unused.weight' and 1 more in the loss, or pass find_unused_parameters=True" in unused
    assert "Call handle.hook(state, bucket) in the hook that you register" in hook


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_checkpoints_that_create_the_optimizers_state_are_no_steps_without_an_average(
    momentum: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1, momentum=momentum) for part in ddp.module]
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizers)
    for _ in range(3):  # without momentum there is no state, and each call creates it again
        get_state_dict(ddp, optimizers)
    assert not caplog.records
    handle.detach()


def test_a_handle_cannot_be_copied_and_says_what_can() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    ddp.gradwire = gw.attach(ddp, "threelc")
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Keep it outside of the module that you copy or save"):
            copies(ddp)
    ddp.gradwire.detach()
    del ddp.gradwire
    copy.deepcopy(ddp)


def test_a_complex_parameter_that_thaws_is_refused_as_at_attach() -> None:
    model = nn.Linear(4, 2)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.register_forward_hook(lambda module, _, out: out.sum() + module.phase.abs().sum())
    ddp = DistributedDataParallel(model)
    model.phase.requires_grad_(False)
    with gw.attach(ddp, "none"):
        model.phase.requires_grad_(True)
        with pytest.raises(AttachError, match=r"Parameter 'phase' is torch\.complex64"):
            ddp(torch.ones(5, 4)).backward()


def test_a_state_loads_into_a_model_with_frozen_parameters_of_other_types() -> None:
    model = nn.Linear(4, 2)
    for dtype in (torch.uint8, torch.int8, torch.bool, torch.complex64):
        model.register_parameter(str(dtype)[6:], nn.Parameter(torch.ones(3).to(dtype), requires_grad=False))
    ddp = DistributedDataParallel(model)
    with gw.attach(ddp, gw.Plan("threelc", min_elements=0)) as handle:
        ddp(torch.ones(5, 4)).sum().backward()
        handle.load_state_dict(handle.state_dict())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_that_leaves_the_block_writes_to_no_file_of_its_parent(tmp_path: Path) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    with gw.attach(ddp, "none") as handle, handle.trace(tmp_path / "trace.json") as trace:
        handle.log_to(tmp_path / "log.csv", every=1)
        ddp(torch.ones(5, 4)).sum().backward()
        before = (tmp_path / "log.csv").read_bytes(), trace.path.read_bytes()
        child = os.fork()
        if child == 0:
            try:
                trace.close()
                handle.detach()
                same = before == ((tmp_path / "log.csv").read_bytes(), trace.path.read_bytes())
                os._exit(0 if same else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "log.csv").read_bytes() != before[0]
    assert trace.path.read_text().endswith("]\n")


def test_it_is_said_which_gradients_are_sparse(caplog: pytest.LogCaptureFixture) -> None:
    ddp = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True))
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
    assert [record.message for record in caplog.records] == [
        "Gradients of weight are sparse: DDP's own all-reduce averages them."
    ]
    ddp(torch.tensor([[1, 2], [3, 3]])).sum().backward()
    assert ddp.module.weight.grad.is_sparse
    handle.detach()


def test_an_optimizer_may_outlive_the_module_and_the_handle(caplog: pytest.LogCaptureFixture) -> None:
    import gc
    import weakref

    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    alive = weakref.ref(gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer))
    assert alive() is not None, "the module keeps its handle"
    del ddp
    gc.collect()
    assert alive() is None
    optimizer.step()
    assert not caplog.records


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=True)
        return inputs


@pytest.mark.parametrize("method", ["threelc", "auto"])
def test_a_backward_pass_is_one_step_if_reentrant_checkpoints_run_others_within_it(method: str) -> None:
    ddp = DistributedDataParallel(Checkpointed(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    waits = []
    with gw.attach(ddp, gw.Plan(method, min_elements=0), optimizer=optimizer) as handle:
        handle.synchronizer.events.listen(lambda event: waits.append(event) if event.kind == "wait" else None)
        for step in range(1, 5):
            ddp(torch.ones(3, 16, requires_grad=True)).sum().backward()
            optimizer.step()
            assert (handle.synchronizer.step, len(waits)) == (step, step)
