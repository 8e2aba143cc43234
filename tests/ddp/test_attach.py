"""`attach` where one process is the whole job: names, commits, state. Several ranks are in tests/integration."""

from __future__ import annotations

import io
import logging
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import AttachError, OptionError, OptionTypeError
from gradwire.core.spec import ElementRange
from gradwire.residuals.slices import ResidualKey


def wrapped(**options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    return DistributedDataParallel(model, **options)  # type: ignore[arg-type]


def backward(ddp: nn.Module) -> None:
    ddp(torch.arange(20.0).view(5, 4)).square().sum().backward()


def gradients(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in ddp.module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("method", "options", "told"), [
    ("auto", gw.SyncOptions(watch_norms=16), True),
    ("auto", gw.SyncOptions(), False),
    ("int8", gw.SyncOptions(watch_norms=16), False),
])  # fmt: skip
def test_auto_says_which_steps_a_watch_does_not_see(
    method: str, options: gw.SyncOptions, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        gw.attach(DistributedDataParallel(nn.Linear(4, 4)), method, options=options).detach()
    assert any("watch_norms does not see" in message for message in caplog.messages) == told


def test_a_job_of_one_rank_trains_as_without_gradwire(caplog: pytest.LogCaptureFixture) -> None:
    plain, attached = wrapped(), wrapped()
    with caplog.at_level(logging.INFO, "gradwire"):
        handle = gw.attach(attached, gw.Plan("threelc", min_elements=0))
    assert "There is one process only, so no gradients are sent, and gradwire does nothing." in caplog.messages
    for ddp in (plain, attached):
        backward(ddp)
    expected = gradients(plain)
    assert set(expected) == {"0.weight", "2.weight", "2.bias"}
    for name, found in gradients(attached).items():
        assert torch.equal(found, expected[name])
    assert handle.report().steps == 1
    handle.detach()
    handle.detach()


def test_a_step_counts_whose_first_bucket_ddp_skips() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.used(batch)

    ddp = DistributedDataParallel(
        Half(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-5
    )
    handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
    for _ in range(3):
        backward(ddp)
    assert handle.report().steps == 3
    assert set(gradients(ddp)) == {"used.weight"}
    handle.detach()


def test_parameters_go_by_their_names_in_the_model_and_frozen_ones_do_not_go() -> None:
    handle = gw.attach(wrapped(), {"*.weight": "threelc", "*": "none"})
    names = handle.synchronizer._tensors.names
    assert names == ["0.weight", "2.weight", "2.bias"]
    assert handle.synchronizer._tensors.entries["0.weight"].compressor.name == "threelc"
    handle.detach()


def test_a_server_is_for_the_strategy_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_AGGREGATOR", raising=False)
    with pytest.raises(OptionError, match=r'Pass gradwire.Plan\(..., strategy="server"\), or leave the server out'):
        gw.attach(wrapped(), "thc", options=gw.SyncOptions(server="127.0.0.1:7071"))
    with pytest.raises(OptionError, match=r'Pass options=gradwire.SyncOptions\(server="host:port"\)'):
        gw.attach(wrapped(), gw.Plan("thc", strategy="server", min_elements=0))
    # One rank has nothing to send there, and calls nobody.
    gw.attach(
        wrapped(), gw.Plan("thc", strategy="server", min_elements=0), options=gw.SyncOptions(server="127.0.0.1:1")
    ).detach()


def test_a_plan_by_auto_says_below_which_size_tensors_stay_dense() -> None:
    handle = gw.attach(wrapped(), gw.Plan("auto", min_elements=3))
    assert handle.autopilot is not None
    assert handle.synchronizer.plan.min_elements == 3
    handle.detach()


def test_fidelity_is_for_auto_alone() -> None:
    for method in ("topk", gw.Plan("topk")):
        with pytest.raises(OptionError, match=r'but the method is "topk"\. Pass "auto", or leave fidelity out\.'):
            gw.attach(wrapped(), method, fidelity="exact")
    handle = gw.attach(wrapped(), "auto")
    assert handle.autopilot is not None and handle.autopilot.fidelity == "balanced"
    handle.detach()


@pytest.mark.parametrize(("options", "advice"), [
    ({"scaler": True}, "scaler must be a GradScaler, not True"),
    ({"check_every": 2.5}, "check_every is a number of backward passes"),
    ({"options": {"timeout": 3}}, r"options must be gradwire\.SyncOptions"),
])  # fmt: skip
def test_arguments_of_wrong_types_are_refused_at_once(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(OptionTypeError, match=advice):
        gw.attach(wrapped(), "threelc", **options)


def test_a_negative_number_of_backward_passes_is_refused() -> None:
    with pytest.raises(OptionError, match="or 0 for never, not -3"):
        gw.attach(wrapped(), "threelc", check_every=-3)


@pytest.mark.parametrize(("options", "error", "advice"), [
    ({"timeout": 30}, OptionTypeError, r"timeout must be a timedelta, not 30\. Pass timedelta\(seconds=30\)"),
    ({"status_interval": 2}, OptionTypeError, "status_interval must be a timedelta"),
    ({"timeout": timedelta.max}, OptionError, "at most 20 days"),
    ({"seed": "a"}, OptionTypeError, "seed must be an int, not 'a'"),
    ({"seed": 1.5}, OptionTypeError, "seed must be an int"),
    ({"seed": 1 << 70}, OptionError, r"seed must be from -2\*\*63 to"),
    ({"threads": True}, OptionTypeError, "threads must be an int"),
])  # fmt: skip
def test_options_of_wrong_types_are_refused(options: dict[str, Any], error: type[Exception], advice: str) -> None:
    with pytest.raises(error, match=advice):
        gw.SyncOptions(**options)


@pytest.mark.parametrize("method", ["auto", "threelc"])
def test_an_attach_that_fails_leaves_no_hooks_on_optimizers(method: str) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no slot")

    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp.register_comm_hook = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no slot"):
        gw.attach(ddp, method, optimizer=optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def commits(handle: gw.Handle) -> int:
    return sum(event.kind == "commit" for event in handle.synchronizer.events.latest())


def test_with_the_optimizer_a_step_commits_and_without_it_the_next_backward_does() -> None:
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    handle = gw.attach(ddp, "threelc", optimizer=optimizer)
    backward(ddp)
    backward(ddp)
    assert commits(handle) == 0
    optimizer.step()
    assert commits(handle) == 1
    handle.detach()
    optimizer.step()
    assert commits(handle) == 1, "a detached handle hears of no more steps"

    handle = gw.attach(ddp, "threelc")
    backward(ddp)
    before = commits(handle)
    backward(ddp)
    assert commits(handle) == before + 1
    handle.detach()


def test_state_goes_through_a_file_without_pickled_objects() -> None:
    ddp = wrapped()
    handle = gw.attach(ddp, "threelc", options=gw.SyncOptions(seed=4))
    for _ in range(3):
        backward(ddp)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    handle.detach()
    file.seek(0)
    handle = gw.attach(ddp, "threelc", options=gw.SyncOptions(seed=5))
    handle.load_state_dict(torch.load(file, weights_only=True))
    assert (handle.synchronizer.step, handle.synchronizer.seed) == (3, 4)
    handle.detach()


def test_a_module_can_be_attached_once_at_a_time() -> None:
    ddp = wrapped()
    first = gw.attach(ddp, "threelc")
    with pytest.raises(AttachError, match=r"already attached. Call handle.detach\(\) first"):
        gw.attach(ddp, "none")
    backward(ddp)
    assert first.report().steps == 1, "the first is not disturbed"
    first.detach()
    second = gw.attach(ddp, "none")
    first.detach()
    backward(ddp)
    assert second.report().steps == 1, "detaching the first again does not detach the second"
    second.detach()


def test_what_cannot_be_attached_says_what_to_use_in_its_place() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    mixed = wrapped(mixed_precision=_MixedPrecision())
    with pytest.raises(AttachError, match=r"without mixed_precision= and run the forward pass under torch.autocast"):
        gw.attach(mixed, "threelc")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reducer = wrapped()
    with pytest.raises(AttachError, match="Set optimize_ddp = True before the module is created"):
        gw.attach(reducer, "threelc")


def test_a_compiled_module_is_attached_under_its_own_names() -> None:
    inner = wrapped()
    handle = gw.attach(torch.compile(inner, backend="eager"), "threelc")
    assert handle.synchronizer._tensors.names == ["0.weight", "2.weight", "2.bias"]
    backward(inner)
    assert handle.report().steps == 1
    handle.detach()


def test_residuals_follow_the_scale_of_the_gradients_and_it_is_saved() -> None:
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = gw.attach(ddp, "threelc", scaler=scaler)
    scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
    key = ResidualKey("0.weight", ElementRange(0, 3))
    handle.synchronizer.residuals.add(key, np.array([1.0, -2.0, 3.0], np.float32))
    scaler.update(16.0)
    saved = handle.state_dict()
    assert saved["loss_scale"] == 8.0, "that of the residuals, not of the next gradients"
    scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
    assert handle.synchronizer.residuals.source(key).tolist() == [2.0, -4.0, 6.0]
    handle.load_state_dict(saved)
    scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
    assert handle.synchronizer.residuals.source(key).tolist() == [2.0, -4.0, 6.0]
    handle.detach()


@pytest.mark.parametrize("first", [True, False])
def test_a_state_may_be_saved_with_a_scaler_and_loaded_without_one_or_the_other_way_round(first: bool) -> None:
    key = ResidualKey("0.weight", ElementRange(0, 3))
    saved: dict[str, Any] = {}
    for has_scaler in (first, not first):
        ddp = wrapped()
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
        handle = gw.attach(ddp, "threelc", optimizer=optimizer, scaler=scaler if has_scaler else None)
        if saved:
            handle.load_state_dict(saved)
        scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
        scaler.step(optimizer)
        if not saved:
            handle.synchronizer.residuals.add(key, np.array([8.0, -16.0, 24.0], np.float32))
        found = handle.synchronizer.residuals.source(key).tolist()
        saved = handle.state_dict()
        assert saved["loss_scale"] == (8.0 if has_scaler else 1.0)
        handle.detach()
    assert found == ([1.0, -2.0, 3.0] if first else [64.0, -128.0, 192.0])


def test_the_scale_of_residuals_is_not_known_if_attach_was_told_of_no_scaler_or_optimizer() -> None:
    for knows_optimizer in (True, False):
        ddp = wrapped()
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        handle = gw.attach(ddp, "threelc", optimizer=optimizer if knows_optimizer else None)
        scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
        scaler.step(optimizer)
        assert handle.state_dict()["loss_scale"] is None
        scaler.update()
        handle.load_state_dict(handle.state_dict() | {"loss_scale": 1.0})
        scaler.scale(ddp(torch.ones(5, 4)).sum()).backward()
        scaler.step(optimizer)
        assert handle.state_dict()["loss_scale"] == (None if knows_optimizer else 1.0)
        handle.detach()


@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer skips within its step
def test_a_step_that_a_foreign_gradient_lets_a_scaler_skip_is_rolled_back(fused: bool) -> None:
    ddp, foreign = wrapped(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*ddp.parameters(), foreign], 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = gw.attach(ddp, "threelc", optimizer=optimizer, scaler=scaler)
    residuals, key = handle.synchronizer.residuals, ResidualKey("0.weight", ElementRange(0, 3))
    residuals.add(key, np.array([8.0, -16.0, 24.0], np.float32))
    for is_foreign_finite in (False, True):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(5, 4)).sum() + foreign.sum()).backward()
        assert residuals.source(key).tolist() == ([8.0, -16.0, 24.0] if not is_foreign_finite else [4.0, -8.0, 12.0])
        residuals.stage(key)[:] = 5.0
        if not is_foreign_finite:
            foreign.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert handle.state_dict()["residuals"]["local"]["0.weight"]["0"].tolist() == [5.0, 5.0, 5.0]
    handle.detach()


def test_residuals_of_another_memory_format_are_refused_with_advice() -> None:
    saved: dict[torch.memory_format, dict[str, Any]] = {}
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 1, 1)).to(memory_format=memory_format)
        ddp = DistributedDataParallel(module)
        handle = gw.attach(ddp, gw.Plan("threelc", min_elements=0))
        for other, state in saved.items():
            if other == memory_format:
                handle.load_state_dict(state)
                handle.load_state_dict([state])
                continue
            with pytest.raises(
                gw.errors.OptionError, match=r"'0\.weight' .* another memory format .*Convert the model"
            ):
                handle.load_state_dict(state)
            del state["orders"]  # as before it was noted
            handle.load_state_dict(state)
        key = ResidualKey("0.weight", ElementRange(0, 3))
        handle.synchronizer.residuals.add(key, np.ones(3, np.float32))
        saved[memory_format] = handle.state_dict()
        handle.detach()


def test_compressors_see_dimensions_in_the_order_of_the_memory() -> None:
    """powersgd takes rows and columns from them: read as another matrix, one of low rank would have a high one."""
    module = nn.Linear(3, 5)
    module.weight = nn.Parameter(torch.randn(3, 5).t())
    module.kernel = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    with gw.attach(DistributedDataParallel(module), gw.Plan("powersgd", min_elements=0)) as handle:
        shapes = {name: spec.shape for name, spec in handle.synchronizer.tensors.items()}
    assert shapes == {"weight": (3, 5), "bias": (5,), "kernel": (2, 4, 5, 3)}


@pytest.mark.parametrize("stride", [21, 1])
def test_a_dimension_of_one_element_has_no_place_in_a_memory_order(stride: int) -> None:
    module = nn.Conv2d(3, 4, (1, 7))
    module.weight = nn.Parameter(torch.randn(84).as_strided((4, 3, 1, 7), (21, 1, stride, 3)))
    ddp = DistributedDataParallel(module)
    handle = gw.attach(ddp, "threelc")
    assert handle.state_dict()["orders"] == {"weight": [0, 3, 1]}
    handle.detach()


def test_a_handle_does_not_keep_its_module_alive() -> None:
    import gc
    import weakref

    ddp = wrapped()
    handle, alive = gw.attach(ddp, "threelc"), weakref.ref(ddp.module)
    backward(ddp)
    del ddp
    gc.collect()
    assert alive() is None
    handle.detach()
