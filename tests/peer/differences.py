"""What torch's tests of DDP cannot show on CPU, and where gradwire differs from DDP on purpose.

Every entry has its reason, and is checked: a test that is said to fail and passes fails the run, and so does a name
that torch's tests do not have.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A test that passes at the baseline and fails with gradwire attached.

    Attributes:
        reason: Why that is right.
        error: Part of the error that it ends with. Another error is not expected.
        world_sizes: Numbers of ranks with which it fails.
    """

    reason: str
    error: str
    world_sizes: tuple[int, ...] = (2, 3)


_SYNC_BATCH_NORM = "SyncBatchNorm takes tensors on GPUs only."
_ACCELERATOR = "DDP asks torch for the accelerator's streams when optimizers step within backward."
_EVENTS = "DDP's mixed_precision= records events of the device, which the CPU does not have."
_DEVICE = "It compares device numbers, which the CPU does not have."
NOT_ON_CPU: dict[str, str] = {
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_ddp_inference": _SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_sync_bn_logged": _SYNC_BATCH_NORM,
    "test_ddp_apply_optim_in_backward": _ACCELERATOR,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _ACCELERATOR,
    "test_ddp_apply_optim_in_backward_ignored_params": _ACCELERATOR,
    "test_ddp_device": _DEVICE,
    "test_ddp_logging_data_gpu": _DEVICE,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _EVENTS,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _EVENTS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _EVENTS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _EVENTS,
}
"""Tests that fail at the baseline, with what they need. Those that torch itself skips are not listed."""

_EXAMPLES = "Its examples are divided among a number of ranks that divides 16."
NOT_WITH: dict[int, dict[str, str]] = {
    3: {
        "test_backward_ddp_inside": _EXAMPLES,
        "test_backward_ddp_outside": _EXAMPLES,
        "test_backward_ddp_outside_uneven_inputs": _EXAMPLES,
        "test_backward_no_ddp": _EXAMPLES,
    }
}
"""The same by number of ranks."""

TOO_LARGE: dict[str, str] = {
    "test_ddp_compile_static_graph": "Compiles C++ for minutes. Tests of our own cover torch.compile.",
    "test_ddp_uneven_inputs": (
        "Trains hundreds of models, a third of them with images of a million pixels: hours on CPU. The other tests of "
        "join() cover uneven inputs."
    ),
}
"""Tests that are not run."""

_HOOK = (
    "The test registers a communication hook of its own, so gradwire is attached with register=False: its mean goes "
    "through the test's hook."
)
OWN_HOOKS: dict[str, str] = {
    "test_accumulate_gradients_no_sync_allreduce_hook": _HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _HOOK,
    "test_ddp_comm_hook_logging": _HOOK,
    "test_ddp_hook_parity_allreduce": _HOOK,
    "test_ddp_hook_parity_allreduce_process_group": _HOOK,
    "test_ddp_hook_parity_post_localSGD": _HOOK,
    "test_ddp_hook_parity_powerSGD": _HOOK,
    "test_ddp_python_error_logged": _HOOK,
}
"""Tests under which gradwire does not take the communication hook."""

DIFFERENCES: dict[str, Difference] = {
    "test_ddp_native_mixed_precision_ignored_params": Difference(
        "DDP's mixed_precision= takes the module's one communication hook, so attach refuses the module.",
        "AttachError: DDP's mixed_precision= has the communication hook slot of this module",
    ),
    "test_ddp_profiling_torch_profiler": Difference(
        "It counts Gloo's all-reduces in a profile. gradwire sends gradients over its own connections.",
        "Expected 6 but got 0",
    ),
}
"""Tests that fail with gradwire attached, and are right to."""
