"""What gradwire relies on of torch without torch's promise. A failure here means: this torch has changed it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import torch_private

Hook = Callable[[Any, torch_private.GradBucket], torch.futures.Future[torch.Tensor]]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2))


def hooked(hook: Hook | None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module(), **options)
    if hook is not None:
        # torch compares annotations as objects, and those of this file are strings.
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return ddp


def backward(ddp: nn.Module) -> None:
    ddp(torch.ones(5, 4)).sum().backward()


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


# -- in_backward ---------------------------------------------------------------------------------------------------


def test_in_backward_is_true_in_a_hook_of_a_backward_and_false_around_it() -> None:
    seen: list[bool] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(torch_private.in_backward())
        return done(bucket.buffer())

    assert torch_private.in_backward() is False
    backward(hooked(hook))
    assert torch_private.in_backward() is False
    assert seen == [True]


def test_in_backward_is_false_in_the_hook_of_a_rank_that_has_joined_early() -> None:
    """A rank that has run out of inputs mirrors the others' all-reduces, with no backward of its own."""
    seen: list[bool] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(torch_private.in_backward())
        return done(bucket.buffer())

    ddp = hooked(hook)
    backward(ddp)
    ddp._match_all_reduce_for_bwd_pass()  # what Join calls on such a rank
    assert seen == [True, False]


# -- after_backward ------------------------------------------------------------------------------------------------


def test_after_backward_runs_once_when_all_gradients_are_there() -> None:
    order: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    product = weight * 2
    product.register_hook(lambda _: torch_private.after_backward(lambda: order.append(f"end {weight.grad.tolist()}")))
    product.register_hook(lambda _: order.append("hook"))
    product.sum().backward()
    order.append("returned")
    assert order == ["hook", "end [2.0, 2.0, 2.0]", "returned"]
    (weight * 3).sum().backward()
    assert len(order) == 3, "for that one backward only"


def test_after_backward_comes_before_the_reducer_takes_the_hooks_results() -> None:
    """So the callback may wait for, or fail on, what the futures will hold."""
    futures: list[torch.futures.Future[torch.Tensor]] = []
    seen: list[bool] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            torch_private.after_backward(end)
        futures.append(torch.futures.Future())
        buffers.append(bucket.buffer())
        return futures[-1]

    def end() -> None:
        # Were the reducer first, it would already wait for these futures, and this would never be called.
        seen.append(all(not future.done() for future in futures))
        for future, buffer in zip(futures, buffers, strict=True):
            future.set_result(torch.full_like(buffer, 7.0))

    buffers: list[torch.Tensor] = []
    ddp = hooked(hook)
    backward(ddp)
    assert seen == [True]
    assert all(bool((parameter.grad == 7).all()) for parameter in ddp.parameters())


def test_an_exception_after_backward_leaves_backward_with_its_type() -> None:
    class OurError(RuntimeError):
        pass

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch_private.after_backward(end)
        return torch.futures.Future()  # stays open, as after a failure

    def end() -> None:
        raise error

    error = OurError("rank 2 is gone")
    with pytest.raises(OurError) as caught:
        backward(hooked(hook))
    assert caught.value is error
    assert torch_private.in_backward() is False


# -- has_comm_hook -------------------------------------------------------------------------------------------------


def test_has_comm_hook_sees_anybodys_hook() -> None:
    assert not torch_private.has_comm_hook(hooked(None))
    assert torch_private.has_comm_hook(hooked(lambda _, bucket: done(bucket.buffer())))


def test_has_comm_hook_sees_what_mixed_precision_registers() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    mixed = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    assert torch_private.has_comm_hook(DistributedDataParallel(module(), mixed_precision=mixed))


def test_has_comm_hook_sees_built_in_hooks_and_none_in_a_copy_which_has_none() -> None:
    ddp = hooked(None)
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    assert torch_private.has_comm_hook(ddp)
    assert not torch_private.has_comm_hook(copy.deepcopy(ddp))


def test_register_hook_leaves_no_hook_in_copies() -> None:
    ddp, called = hooked(None), []

    def hook(bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        called.append(bucket.index())
        return done(bucket.buffer())

    torch_private.register_hook(ddp, lambda state, bucket: hook(bucket))
    assert torch_private.has_comm_hook(ddp)
    twin = copy.deepcopy(ddp)
    backward(twin)
    assert not called
    assert not torch_private.has_comm_hook(twin)
    backward(ddp)
    assert called == [0]


def test_steps_in_backward_sees_optimizers_for_which_ddp_takes_the_hook_in_its_next_forward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    ddp = hooked(None)
    assert not torch_private.steps_in_backward(ddp)
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), {"lr": 0.1})
    assert torch_private.steps_in_backward(ddp)
    assert not torch_private.has_comm_hook(ddp)  # the forward that takes it needs an accelerator


def test_is_replicated_knows_modules_whose_ddp_module_comes_with_the_first_forward() -> None:
    from torch.distributed._composable.replicate import replicate

    replicated = replicate(module())
    assert torch_private.is_replicated(replicated)
    assert not torch_private.is_replicated(hooked(None))
    assert not hasattr(replicate.state(replicated), "_ddp")


def test_torch_takes_one_hook_a_module_so_a_taken_slot_must_be_noticed() -> None:
    ddp = hooked(lambda _, bucket: done(bucket.buffer()))
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))


# -- modes of DDP --------------------------------------------------------------------------------------------------


def test_has_mixed_precision_is_of_the_module() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    assert torch_private.has_mixed_precision(DistributedDataParallel(module(), mixed_precision=_MixedPrecision()))
    assert not torch_private.has_mixed_precision(hooked(None))


def test_has_python_reducer_is_set_where_hooks_get_gradients_instead_of_buckets() -> None:
    seen: list[type] = []
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = hooked(lambda _, given: seen.append(type(given)))  # type: ignore[arg-type, return-value]
        ddp(torch.ones(5, 4))  # the first forward sets the hooks
        backward(ddp)
    assert torch_private.has_python_reducer(ddp)
    assert set(seen) <= {tuple}
    assert not torch_private.has_python_reducer(hooked(None))


def test_divides_by_active_ranks_within_such_a_join_alone() -> None:
    ddp = hooked(None)
    assert not torch_private.divides_by_active_ranks(ddp)
    for by_initial, enable, expected in ((True, True, False), (False, True, True), (False, False, False)):
        with ddp.join(divide_by_initial_world_size=by_initial, enable=enable):
            assert torch_private.divides_by_active_ranks(ddp) == expected
            backward(ddp)


@pytest.mark.parametrize("static", [True, False])
def test_waits_before_callbacks_wherever_the_reducer_takes_results_first(static: bool) -> None:
    said: list[bool] = []
    taken: list[bool] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert torch_private.in_backward()
        if bucket.index() == 0:
            said.append(torch_private.waits_before_callbacks(ddp))
            torch_private.after_backward(lambda: taken.append(bool((first.grad == 7).all())))
        return done(torch.full_like(bucket.buffer(), 7.0))

    ddp = hooked(hook, static_graph=static)
    first = next(ddp.parameters())
    for _ in range(4):
        ddp.zero_grad(set_to_none=False)
        backward(ddp)
    assert taken == [static, False, False, False]
    assert all(expected or not found for expected, found in zip(said, taken, strict=True)), "it never misses one"
    assert said[2:] == [False, False], "and soon says no"


def test_may_skip_parameters_where_the_graph_is_searched() -> None:
    found = [
        torch_private.may_skip_parameters(hooked(None, **options))
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})
    ]
    assert found == [False, True, True]


@pytest.mark.parametrize("as_view", [False, True])
def test_num_users_are_known_after_the_means_and_discards_means_tells_what_becomes_of_those_without(
    as_view: bool,
) -> None:
    known: list[list[int]] = []

    def hook(state: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def again() -> None:
            torch_private.after_backward(lambda: known.append(torch_private.num_users(ddp)))

        torch_private.after_backward(again)
        return done(torch.full_like(bucket.buffer(), 7.0))

    ddp = hooked(hook, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    backward(ddp)
    for each in ddp.parameters():
        each.grad.fill_(3.0)
    ddp.module.forward = ddp.module[:1].forward
    backward(ddp)
    assert known == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    kept = 3 if torch_private.discards_means(ddp) else 7
    assert [float(each.grad.view(-1)[0]) for each in ddp.parameters()] == [7, 7, kept, kept, kept, kept]
    assert kept == (7 if as_view else 3)


def test_uncompiled_finds_the_module_and_its_names() -> None:
    inner = module()
    compiled = torch.compile(inner, backend="eager")
    assert torch_private.uncompiled(compiled) is inner
    assert torch_private.uncompiled(inner) is inner
    names = [name for name, _ in inner.named_parameters()]
    assert [name for name, _ in compiled.named_parameters()] != names
    assert [torch_private.uncompiled_name(name) for name, _ in compiled.named_parameters()] == names
    nested = nn.Sequential(compiled, torch.compile(nn.Linear(2, 2), backend="eager"))
    assert [torch_private.uncompiled_name(name) for name, _ in nested.named_parameters()] == [
        *(f"0.{name}" for name in names),
        "1.weight",
        "1.bias",
    ]


# -- bucket_parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.00005])
@pytest.mark.parametrize("as_view", [False, True])
def test_bucket_parameters_are_the_modules_own_in_the_order_of_the_gradients(
    bucket_cap_mb: float, as_view: bool
) -> None:
    """In every layout: the first backward's, and the one that DDP rebuilds after it."""
    buckets: list[list[tuple[int, torch.Tensor, bool]]] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters, gradients = torch_private.bucket_parameters(bucket), bucket.gradients()
        assert len(parameters) == len(gradients)
        first, size = bucket.buffer().data_ptr(), bucket.buffer().numel() * 4
        rows = [
            (id(parameter), gradient.clone(), first <= gradient.data_ptr() < first + size)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        buckets.append(rows)
        return done(bucket.buffer())

    plain, ddp = module(), hooked(hook, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=as_view)
    backward(plain)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    for _ in range(3):
        buckets.clear()
        ddp.zero_grad()
        backward(ddp)
        rows = [row for bucket in buckets for row in bucket]
        assert sorted(names[found] for found, _, _ in rows) == sorted(names.values())
        for found, gradient, in_buffer in rows:
            assert torch.equal(gradient, expected[names[found]])
            assert in_buffer, "gradients are views of the bucket: writing them writes the result"
    assert (len(buckets) > 1) == (bucket_cap_mb < 1)


def test_a_parameter_that_backward_did_not_reach_has_no_grad_in_the_hook() -> None:
    """How an unused parameter is told from one whose gradient is zero."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)

    seen: dict[int, tuple[bool, bool]] = {}

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(torch_private.bucket_parameters(bucket), bucket.gradients(), strict=True):
            seen[id(parameter)] = (parameter.grad is not None, bool(gradient.any()))
        return done(bucket.buffer())

    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    backward(ddp)
    for parameter in ddp.module.used.parameters():
        assert seen[id(parameter)] == (True, True)
    for parameter in ddp.module.unused.parameters():
        assert seen[id(parameter)] == (False, False)


def test_a_bucket_says_which_is_the_first_of_a_backward() -> None:
    indices: list[int] = []

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        indices.append(bucket.index())
        return done(bucket.buffer())

    ddp = hooked(hook, bucket_cap_mb=0.00005)
    for _ in range(3):
        indices.clear()
        backward(ddp)
        assert indices == list(range(len(indices)))
    assert len(indices) > 1


# -- bucket_gradient, in_bucket_order ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bucket_has_gradients_one_after_the_other_in_their_parameters_order_in_memory(as_view, memory_format) -> None:
    found: dict[int, torch.Tensor] = {}

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters, all_of_them = torch_private.bucket_parameters(bucket), bucket.gradients()
        for index, (parameter, among_all) in enumerate(zip(parameters, all_of_them, strict=True)):
            one = torch_private.bucket_gradient(bucket, parameters, index)
            assert (one.data_ptr(), one.shape, one.stride()) == (
                among_all.data_ptr(), among_all.shape, among_all.stride()
            )  # fmt: skip
            found[id(parameter)] = one.reshape(-1).clone()
        return done(bucket.buffer())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).to(memory_format=memory_format)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    for _ in range(3):  # DDP rebuilds its buckets after the first
        found.clear()
        ddp.zero_grad()
        ddp(torch.randn(2, 3, 6, 6)).square().sum().backward()
        assert len(found) == 4
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert torch.equal(torch_private.in_bucket_order(parameter.grad, parameter), found[id(parameter)])


def test_what_is_not_dense_in_memory_is_in_the_order_of_its_dimensions() -> None:
    values, spread = torch.arange(12.0).reshape(3, 4), torch.empty(3, 8)[:, ::2]
    assert torch.equal(torch_private.in_bucket_order(values, spread), torch.arange(12.0))
    assert torch.equal(torch_private.in_bucket_order(values, torch.empty(4, 3).T), values.T.reshape(-1))


# -- parameters ----------------------------------------------------------------------------------------------------


def test_replicated_tensors_are_all_that_ddp_is_not_told_to_ignore() -> None:
    one = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    one[0].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(one, ["2.bias", "1.running_var"])
    ddp = DistributedDataParallel(one)
    one[1].running_mean = torch.ones(2)
    parameters, buffers = torch_private.replicated_tensors(ddp)
    named = dict(one.named_parameters())
    assert [id(each) for each in parameters] == [id(named[name]) for name in named if name != "2.bias"]
    assert [id(each) for each in buffers] == [id(one[1].running_mean), id(one[1].num_batches_tracked)]


def test_trained_parameters_are_those_that_ddp_would_take_now_and_buckets_have_those_it_took() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.words = nn.EmbeddingBag(10, 4, sparse=True)
            self.body, self.head, self.left_out = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)
            self._ddp_params_and_buffers_to_ignore = ["left_out.weight", "left_out.bias", "scale"]

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.scale * self.head(self.body(self.words(words)))
            return result

    in_buckets: list[str] = []
    are_sparse: dict[str, bool] = {}

    def hook(_: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        names = [torch_private.parameter_names(ddp)[id(each)] for each in torch_private.bucket_parameters(bucket)]
        in_buckets.extend(names)
        are_sparse.update(dict.fromkeys(names, torch_private.is_sparse(bucket)))
        return done(bucket.buffer())

    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    ddp.module.body.requires_grad_(False)
    ddp(torch.tensor([[1, 2]])).sum().backward()
    trained = [name for name, _ in torch_private.trained_parameters(ddp)]
    assert trained == ["scale", "head.weight", "head.bias"], "DDP cannot ignore what stands in the root"
    assert [name for name, _ in torch_private.trained_parameters(ddp, sparse=True)] == ["words.weight"]
    named = torch_private.parameter_names(ddp)
    learning = [named[id(each)] for each in torch_private.learning_parameters(ddp)]
    assert learning == ["words.weight", "head.weight", "head.bias"]
    assert sorted(in_buckets) == sorted([*trained, "words.weight", "body.weight", "body.bias"])
    assert [name for name, is_sparse in are_sparse.items() if is_sparse] == ["words.weight"]


# -- stepping_scaler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])  # the scaler leaves the scale to fused ones
@pytest.mark.parametrize("enabled", [True, False])
def test_a_hook_of_the_optimizer_sees_the_scaler_that_steps_it(fused: bool, enabled: bool) -> None:
    model, seen = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the optimizer's step
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch_private.stepping_scaler()))
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    assert seen == [scaler if enabled else None, None]
