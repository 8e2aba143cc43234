"""Attaches gradwire to every DDP module that a test makes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.spec import TensorSpec
from gradwire.core.torch_private import GradBucket
from gradwire.sync import warmup as kernels

BASELINE = "baseline"
METHODS = {"none": gradwire.Plan("none"), "lossless": gradwire.Plan("lossless", min_elements=0)}
OPTIONS = gradwire.SyncOptions(timeout=timedelta(seconds=10))

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def warm_up(method: str) -> None:
    """Load the kernels of a method, which otherwise takes each fork of this process longer than its test."""
    shapes = ((64, 64), (64,)) if method != BASELINE else ()
    specs = [TensorSpec(shape, torch.float32) for shape in shapes]
    kernels.warm_up([(METHODS[method].entry("weight", spec), spec.dtype) for spec in specs])


def install(method: str, register: bool, note: Callable[[], None]) -> None:
    """Attach, in this process and its forks, at the end of the constructor of DDP.

    That is the only moment at which all ranks of a module certainly meet: a test may train on some ranks only, or a
    different number of steps on each.

    Args:
        method: A name of `METHODS`, or `BASELINE`, under which modules are only counted.
        register: Whether gradwire takes the communication hook. If not, and the test registers a hook of its own, that
            hook is called with what gradwire has averaged, the way `register=False` is meant. All ranks have the same
            mean by then, and a hook that averages leaves it as it is. Modules without a hook stay plain DDP.
        note: Called for each module that was made, and attached.
    """
    create, register_hook = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    handles: weakref.WeakKeyDictionary[DistributedDataParallel, gradwire.Handle] = weakref.WeakKeyDictionary()

    def create_attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        if method != BASELINE:
            handles[self] = gradwire.attach(self, METHODS[method], register=register, options=OPTIONS)
        note()

    def register_chained(self: DistributedDataParallel, state: Any, hook: CommHook) -> None:
        handle = handles.get(self)
        if handle is None or not callable(hook):  # gradwire registers its own, or the test expects an error
            register_hook(self, state, hook)
            return

        @functools.wraps(hook)  # tests look at its name
        def average_first(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            handle.hook(None, bucket).wait()
            return hook(state, bucket)

        register_hook(self, state, average_first)

    DistributedDataParallel.__init__ = create_attached
    DistributedDataParallel.register_comm_hook = register_chained
